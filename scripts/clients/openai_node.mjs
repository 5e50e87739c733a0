// openai for Node against the server: whole replies, streams, the stream helper, tools, errors.
//
// Run by `scripts/run_clients`: node FILE URL MODEL KEY; JAXSERVE_CLIENT is the folder of the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.env.JAXSERVE_CLIENT, "package.json"));
const OpenAI = require("openai");

const [url, model, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Say something of 🙂 and Zürich." }];
const greedy = { model, messages, temperature: 0, seed: 7, max_tokens: 12 };
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Oslo", "Bergen"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const checks = {
  async models() {
    const page = await client.models.list();
    assert.equal(page.data[0].id, model);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async completions() {
    const fields = { model, prompt: "hello", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create({ ...fields, logprobs: 1 });
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
      text += chunk.choices[0].text;
    }
    assert.equal(text, whole.choices[0].text);
    assert.equal(whole.choices[0].logprobs.tokens.join(""), text);
  },

  async chat() {
    const whole = await client.chat.completions.create(greedy);
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "";
    let usage;
    for await (const chunk of await client.chat.completions.create({ ...greedy, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
  },

  async streamHelper() {
    const whole = await client.chat.completions.create(greedy);
    const stream = client.chat.completions.stream(greedy);
    const deltas = [];
    stream.on("content", (delta) => deltas.push(delta));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.equal(deltas.join(""), whole.choices[0].message.content);
  },

  async tools() {
    const fields = { ...greedy, max_tokens: 80, tools: [tool], parallel_tool_calls: false };
    for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
      const whole = await client.chat.completions.create({ ...fields, tool_choice });
      const [call, ...others] = whole.choices[0].message.tool_calls;
      assert.equal(others.length, 0);
      assert.ok(["Oslo", "Bergen"].includes(JSON.parse(call.function.arguments).city));
      const stream = client.chat.completions.stream({ ...fields, tool_choice });
      const [streamed] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
      assert.equal(streamed.function.arguments, call.function.arguments);
      assert.equal(streamed.function.name, "get_weather");
    }
  },

  async runTools() {
    const seen = [];
    const runner = client.chat.completions.runTools({
      ...greedy,
      max_tokens: 80,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [
        {
          type: "function",
          function: {
            ...tool.function,
            parse: JSON.parse,
            function: ({ city }) => {
              seen.push(city);
              return `-3 degrees in ${city}`;
            },
          },
        },
      ],
    });
    await runner.done();
    assert.equal(seen.length, 1);
  },

  async structuredOutput() {
    const schema = {
      type: "object",
      properties: { n: { type: "integer", enum: [1, 2] } },
      required: ["n"],
      additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { name: "n", schema, strict: true } };
    const reply = await client.chat.completions.parse({ ...greedy, max_tokens: 40, response_format });
    assert.ok([1, 2].includes(JSON.parse(reply.choices[0].message.content).n));
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    await assert.rejects(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
    const other = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(other.models.list(), OpenAI.AuthenticationError);
  },

  async leaving() {
    for (let i = 0; i < 4; i++) {
      const stream = await client.chat.completions.create({
        ...greedy, max_tokens: 500, stream: true, ignore_eos: true,
      });
      for await (const _ of stream) break;
    }
    await checks.chat();
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`  ok      ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`  failed  ${name}: ${String(error).slice(0, 600)}`);
    console.error(error);
  }
}
process.exit(failed ? 1 : 0);
