"""/metrics: counters that only rise, totals that equal what the replies say, whatever happens to requests."""

import asyncio
import json
import re

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server import measures
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient

COUNTERS = (
    *("prompt_tokens", "generation_tokens", "request_success", "corrupted_requests"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens"),
    "iteration_tokens_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_healthy")


async def scrape(http: httpx.AsyncClient) -> dict[str, float]:
    """Every sample, by its name and the labels that tell it from others."""
    reply = await http.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = {k: v for k, v in sorted(sample.labels.items()) if k != "model_name"}
            name = sample.name + ("".join(f"[{v}]" for v in labels.values()))
            assert name not in found, f"{name} is told twice"
            found[name] = sample.value
    return found


def counters(samples: dict[str, float]) -> dict[str, float]:
    ours = {k: v for k, v in samples.items() if k.startswith(("jaxserve:", "vllm:", "http_"))}
    return {k: v for k, v in ours.items() if re.search(r"_(total|bucket|count|sum)(\[|$)", k)}


class Watch:
    """Scrapes again and again and holds that no counter falls."""

    def __init__(self, http):
        self.http = http
        self.last: dict[str, float] = {}

    async def __call__(self) -> dict[str, float]:
        samples = await scrape(self.http)
        now = counters(samples)
        fallen = {k: (v, now.get(k)) for k, v in self.last.items() if now.get(k, -1) < v}
        assert not fallen
        self.last = now
        return samples


def ended(samples: dict[str, float]) -> dict[str, float]:
    return {
        reason: samples[f"jaxserve:request_success_total[{reason}]"]
        for reason in ("stop", "length", "abort", "error")
    }


def test_every_name_is_there_and_the_format_is_valid():
    async def check():
        async with serving(metrics_compat="vllm") as http:
            await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
            samples = await scrape(http)
            for prefix in ("jaxserve:", "vllm:"):
                for name in COUNTERS[:2] + COUNTERS[3:]:
                    assert prefix + name + "_total" in samples
                for name in HISTOGRAMS:
                    assert (
                        samples[f"{prefix}{name}_bucket[+Inf]"] == samples[f"{prefix}{name}_count"]
                    )
                for name in GAUGES:
                    assert prefix + name in samples
                assert samples[f"{prefix}cache_config_info[4][int64][0][256]"] == 1
            assert samples["http_requests_total[/v1/completions][POST][200]"] == 1
            reply = await http.get(
                "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
            )
            assert reply.headers["content-type"].startswith("application/openmetrics-text")
            names = {f.name for f in openmetrics.text_string_to_metric_families(reply.text)}
            assert "jaxserve:prompt_tokens" in names

    asyncio.run(check())


def test_vllms_names_are_given_only_when_asked_for():
    async def check():
        async with serving() as http:
            text = (await http.get("/metrics")).text
            assert "vllm:" not in text
            assert 'jaxserve:engine_healthy{model_name="fake"} 1.0' in text

    asyncio.run(check())


def test_totals_equal_the_replies_under_everything_that_may_happen():
    """Case C44."""

    async def check():
        client = FakeEngineClient(num_pages=20, max_num_seqs=4, max_num_batched_tokens=16)
        async with serving(client) as http:
            watch = Watch(http)
            bodies = [
                {"prompt": [7, 8, 9, 10, 11] * 3 + [i], "max_tokens": 30, "stop": ["\n"]}
                for i in range(6)
            ]
            bodies += [{"prompt": [1, 2, 3], "max_tokens": 5, "n": 3}]
            bodies += [{"prompt": [[4, 5], [6]], "max_tokens": 4}]
            bodies += [{"prompt": [5, 6], "max_tokens": 4, "stream": True}]
            bodies += 2 * [{"prompt": list(range(40, 60)), "max_tokens": 3}]  # a full hit
            tasks = [asyncio.create_task(http.post("/v1/completions", json=b)) for b in bodies]
            while not all(task.done() for task in tasks):
                await watch()
                await asyncio.sleep(0)  # nothing in a scrape waits: the others get their turn here
            replies = [task.result() for task in tasks]
            assert {reply.status_code for reply in replies} == {200}
            usages = [
                reply.json()["usage"] for reply in replies if reply.text.startswith("{")
            ]  # the streamed one says none: 2 + 4 tokens
            assert client.engine.stats().num_preemptions > 0
            hit = await http.post("/v1/completions", json=bodies[-1])
            usages.append(hit.json()["usage"])

            for bad in ({"prompt": "x", "n": 0}, {"prompt": [1] * 600}, {"prompt": [99999999]}):
                assert (await http.post("/v1/completions", json=bad)).status_code == 400
                await watch()

            samples = await watch()
            num_requests = len(bodies) + 1 + 1  # one body had two prompts
            assert sum(ended(samples).values()) == num_requests
            assert ended(samples)["abort"] == ended(samples)["error"] == 0
            prompt = sum(usage["prompt_tokens"] for usage in usages) + 2
            output = sum(usage["completion_tokens"] for usage in usages) + 4
            assert samples["jaxserve:prompt_tokens_total"] == prompt
            assert samples["jaxserve:generation_tokens_total"] == output
            for name in (
                *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
                *("request_queue_time_seconds", "request_prompt_tokens", "request_params_n"),
            ):
                assert samples[f"jaxserve:{name}_count"] == num_requests
            assert samples["jaxserve:request_prompt_tokens_sum"] == prompt
            assert samples["jaxserve:request_generation_tokens_sum"] == output
            # Each choice has a first part, sometimes of several tokens: there is no gap in it.
            gaps = samples["jaxserve:inter_token_latency_seconds_count"]
            assert output / 2 < gaps <= output - num_requests - 2
            queries = samples["jaxserve:prefix_cache_queries_total"]
            assert 0 < samples["jaxserve:prefix_cache_hits_total"] <= queries
            stats = client.engine.stats()
            assert samples["jaxserve:iteration_tokens_total_count"] == stats.num_steps
            assert samples["jaxserve:iteration_tokens_total_sum"] == stats.num_scheduled_tokens
            assert samples["jaxserve:http_requests_total[/v1/completions][POST][400]"] == 3
            assert_idle(samples)

    asyncio.run(check())


def assert_idle(samples):
    assert samples["jaxserve:num_requests_running"] == 0
    assert samples["jaxserve:num_requests_waiting"] == 0
    assert samples["jaxserve:kv_cache_usage_perc"] == 0
    assert samples["jaxserve:pages[owned]"] == 0


async def abandoned(http, body, engine, *, after_steps):
    """A request whose client leaves: while it waits, or after some steps."""
    http.engine_client.running.clear()
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    while not engine.has_work():
        await asyncio.sleep(0)
    if after_steps:
        goal = engine.stats().num_steps + after_steps
        http.engine_client.running.set()
        while engine.stats().num_steps < goal:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    http.engine_client.running.set()


@pytest.mark.parametrize("after_steps", [0, 3])
def test_a_request_whose_client_left_counts_as_aborted(after_steps):
    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            http.engine_client = client
            watch = Watch(http)
            body = {"prompt": [1, 2, 3], "max_tokens": 50}
            await abandoned(http, body, client.engine, after_steps=after_steps)
            samples = await watch()
            assert ended(samples) == {"stop": 0, "length": 0, "abort": 1, "error": 0}
            assert samples["jaxserve:prompt_tokens_total"] == 3
            first = samples["jaxserve:time_to_first_token_seconds_count"]
            assert first == (1 if after_steps else 0)
            assert samples["jaxserve:e2e_request_latency_seconds_count"] == 0
            assert samples["jaxserve:http_requests_total[/v1/completions][POST][499]"] == 1
            assert_idle(samples)

    asyncio.run(check())


def test_a_model_that_computes_nonsense_is_counted():
    async def check():
        async with serving(FakeEngineClient(poison=[77])) as http:
            reply = await http.post("/v1/completions", json={"prompt": [77], "max_tokens": 4})
            assert reply.status_code == 500
            samples = await scrape(http)
            assert ended(samples) == {"stop": 0, "length": 0, "abort": 0, "error": 1}
            assert samples["jaxserve:corrupted_requests_total"] == 1
            assert samples["jaxserve:time_to_first_token_seconds_count"] == 0

    asyncio.run(check())


def test_a_max_tokens_beyond_every_float_is_counted(caplog):
    async def check():
        async with serving(FakeEngineClient()) as http:
            body = {"prompt": [1], "max_tokens": 10**400}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            samples = await scrape(http)
            assert samples["jaxserve:request_params_max_tokens_count"] == 1
            assert samples["jaxserve:e2e_request_latency_seconds_count"] == 1
            assert samples["jaxserve:request_decode_time_seconds_count"] == 1

    asyncio.run(check())
    assert "failed" not in caplog.text


def test_what_the_queue_refuses_is_counted():
    async def check():
        client = FakeEngineClient(max_num_seqs=1)
        async with serving(client, max_queue_requests=0) as http:
            client.running.clear()
            body = {"prompt": [1], "max_tokens": 2}
            first = asyncio.create_task(http.post("/v1/completions", json=body))
            while not client.engine.has_work():
                await asyncio.sleep(0)
            assert (await http.post("/v1/completions", json=body)).status_code == 429
            client.running.set()
            await first
            samples = await scrape(http)
            assert samples["jaxserve:requests_refused_total"] == 1
            assert samples["jaxserve:http_requests_total[/v1/completions][POST][429]"] == 1
            assert sum(ended(samples).values()) == 1

    asyncio.run(check())


def test_a_dead_engine_is_told_at_once_with_what_was_known():
    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            watch = Watch(http)
            await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
            await watch()
            client.fail("killed")
            client.stats = never
            async with asyncio.timeout(0.5):
                samples = await watch()
            assert samples["jaxserve:engine_healthy"] == 0
            assert samples["jaxserve:generation_tokens_total"] == 3
            assert "jaxserve:num_requests_running" not in samples

    asyncio.run(check())


def test_requests_that_a_dying_engine_takes_along_are_errors():
    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            client.running.clear()
            body = {"prompt": [1, 2], "max_tokens": 3}
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            while not client.engine.has_work():
                await asyncio.sleep(0)
            client.fail("killed")
            assert (await task).status_code == 503
            assert ended(await scrape(http))["error"] == 1
            client.running.set()

    asyncio.run(check())


async def never():
    await asyncio.sleep(3600)


def test_an_engine_that_does_not_answer_holds_no_scrape_up(monkeypatch):
    monkeypatch.setattr("jaxserve.server.metrics.STATS_TIMEOUT_S", 0.01)

    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
            before = await scrape(http)
            client.stats = never
            after = await scrape(http)
            same = "jaxserve:prefix_cache_queries_total"
            assert after[same] == before[same]
            assert after["jaxserve:engine_healthy"] == 1

    asyncio.run(check())


def test_a_fault_in_the_metrics_breaks_no_request(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no such bucket")

    async def check():
        async with serving() as http:
            monkeypatch.setattr(measures.Histogram, "observe", broken)
            reply = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
            assert reply.status_code == 200
            assert reply.json()["usage"]["completion_tokens"] == 3
            assert (await http.get("/metrics")).status_code == 200

    asyncio.run(check())
    assert "Generation.output failed" in caplog.text


def test_paths_that_clients_make_up_are_one():
    async def check():
        async with serving() as http:
            for path in ("/a", "/b", "/v1/models/fake", "/v1/models/x"):
                await http.get(path)
            await http.request("BREW", "/v1/models")
            samples = await scrape(http)
            name = "jaxserve:http_requests_total"
            assert samples[name + "[other][GET][404]"] == 2
            assert samples[name + "[/v1/models/{name:path}][GET][200]"] == 1
            assert samples[name + "[/v1/models/{name:path}][GET][404]"] == 1
            assert samples[name + "[/v1/models][OTHER][405]"] == 1

    asyncio.run(check())


def test_the_stream_says_what_the_metrics_count():
    async def check():
        async with serving() as http:
            body = {"prompt": [1, 2], "max_tokens": 6, "stream": True}
            body["stream_options"] = {"include_usage": True}
            text = (await http.post("/v1/completions", json=body)).text
            usage = json.loads(text.split("data: ")[-2])["usage"]
            samples = await scrape(http)
            assert samples["jaxserve:prompt_tokens_total"] == usage["prompt_tokens"]
            assert samples["jaxserve:generation_tokens_total"] == usage["completion_tokens"] == 6
            assert samples["jaxserve:time_to_first_token_seconds_sum"] > 0

    asyncio.run(check())
