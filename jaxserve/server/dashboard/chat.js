// The box to try the model: streams /v1/chat/completions, or /v1/completions where there is no template.
// What the model says is text and stays text: it is never read as HTML.

const $ = (id) => document.getElementById(id);

// Events of a stream of server-sent events, as objects, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function problemOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

export class Chat {
  // send(path, options) is fetch with the key.
  constructor(send) {
    this.send = send;
    this.said = []; // messages so far
    this.served = { model: "", speaks: "chat" };
    this.running = null;
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("ask").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    for (const idea of document.querySelectorAll(".idea")) {
      idea.addEventListener("click", () => {
        $("prompt").value = idea.textContent;
        $("prompt").focus();
        this.ask();
      });
    }
  }

  serve(served) {
    if (served.model === this.served.model && served.speaks === this.served.speaks) return;
    this.served = served;
    const chats = served.speaks === "chat";
    $("h-chat").textContent = chats ? "Chat" : "Complete a text";
    $("system-field").hidden = !chats;
    const mute = served.speaks === "tokens";
    $("send").disabled = $("prompt").disabled = mute;
    for (const idea of document.querySelectorAll(".idea")) idea.hidden = !chats;
    if (mute) $("hint-text").textContent = "This checkpoint has no tokenizer: it is served by token ids only.";
  }

  clear() {
    this.running?.abort();
    this.said = [];
    $("log").replaceChildren($("hint"));
    $("hint").hidden = false;
    $("prompt").focus();
  }

  // A message on the page.
  add(role, text) {
    const node = document.createElement("div");
    node.className = `said ${role}`;
    node.textContent = text;
    const who = document.createElement("span");
    who.className = "sr";
    who.textContent = role === "user" ? "You: " : "Model: ";
    $("hint").hidden = true;
    $("log").append(who, node);
    this.toEnd();
    return node;
  }

  body(text) {
    const body = { model: this.served.model, stream: true, stream_options: { include_usage: true } };
    const [temperature, most] = [$("temperature").value, $("max-tokens").value];
    if (temperature !== "") body.temperature = Number(temperature);
    if (most !== "") body.max_tokens = Number(most);
    if (this.served.speaks !== "chat") return ["v1/completions", { ...body, prompt: text }];
    const system = $("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...body, messages: [...first, ...this.said] }];
  }

  async ask() {
    const text = $("prompt").value;
    if (this.running || !text.trim()) return;
    this.said.push({ role: "user", content: text });
    this.add("user", text);
    $("prompt").value = "";
    const node = this.add("assistant busy", "");
    const running = (this.running = new AbortController());
    this.busy(true);
    const reply = { text: "", usage: null, began: performance.now(), first: 0, last: 0, reason: null };
    try {
      await this.read(text, node, reply, running.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(node, reply, error);
      else reply.reason = "stopped";
    }
    node.classList.remove("busy");
    if (reply.text) this.said.push({ role: "assistant", content: reply.text });
    else this.said.pop(); // it was not answered
    if (reply.reason) this.sum(reply);
    if (this.running === running) this.running = null;
    this.busy(false);
  }

  async read(text, node, reply, signal) {
    const [path, body] = this.body(text);
    const answer = await this.send(path, {
      method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    if (!answer.ok) throw new Error(await problemOf(answer));
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      reply.usage = event.usage ?? reply.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const added = choice.delta ? (choice.delta.content ?? "") : choice.text;
      reply.reason = choice.finish_reason ?? reply.reason;
      if (!added) continue;
      reply.last = performance.now();
      reply.first ||= reply.last;
      reply.text += added;
      this.grow(node, added);
    }
  }

  // Adds text; the log follows only those who look at its end.
  grow(node, added) {
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    node.append(added);
    if (follows) this.toEnd();
  }

  toEnd() {
    $("log").scrollTop = $("log").scrollHeight;
  }

  fail(node, reply, error) {
    if (reply.text) node = this.add("assistant", "");
    node.classList.add("failed");
    node.textContent = error.message;
  }

  sum(reply) {
    const node = document.createElement("p");
    node.className = "meta";
    const tokens = reply.usage?.completion_tokens;
    const parts = [reply.reason === "length" ? "cut at max tokens" : reply.reason];
    if (tokens !== undefined) parts.push(`${tokens} tokens`);
    if (reply.first) parts.push(`first after ${Math.round(reply.first - reply.began)} ms`);
    if (tokens > 1 && reply.last > reply.first) {
      parts.push(`${((1000 * (tokens - 1)) / (reply.last - reply.first)).toFixed(1)} tok/s`);
    }
    node.textContent = parts.join(" · ");
    $("log").append(node);
    this.toEnd();
  }

  busy(is) {
    const focused = document.activeElement;
    $("log").setAttribute("aria-busy", String(is)); // read out once, when it is whole
    $("send").hidden = is;
    $("stop").hidden = !is;
    if (is && focused === $("send")) $("stop").focus();
    if (!is && (focused === $("stop") || focused === document.body)) $("prompt").focus();
  }
}
