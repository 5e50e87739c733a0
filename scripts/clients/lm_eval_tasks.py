"""lm-eval's local-completions against the server, on tasks of ours; its figures are computed a second time.

Run by `scripts/run_clients` with the client's own Python. The tasks lie in data/lm_eval; token ids, their
limits and the end token come from the server's own /tokenize and /tokenizer_info.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from scripts.clients.checks import equal, require, run_checks, server_of_arguments

SERVER = server_of_arguments()
TASKS = Path(__file__).parent / "data" / "lm_eval"
NAMES = ("jaxserve_choice", "jaxserve_generate", "jaxserve_perplexity")
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": SERVER.key}


def evaluate(folder: Path, tokenized: bool) -> dict[str, Any]:
    """Runs the tasks; the results by task."""
    arguments = {
        "base_url": f"{SERVER.base_url}/completions",
        "model": SERVER.model,
        "tokenizer_backend": "remote",
        "auth_token": SERVER.key,
        "tokenized_requests": tokenized,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    command = [str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--tasks", ",".join(NAMES), "--include_path", str(TASKS)]
    command += ["--output_path", str(folder), "--log_samples"]
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    sys.stderr.write(done.stdout + done.stderr)
    require(done.returncode == 0, f"lm_eval ended with {done.returncode}: {done.stderr[-500:]}")
    (results,) = folder.rglob("results_*.json")
    return json.loads(results.read_text("utf-8"))["results"]


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def complete(**body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{SERVER.base_url}/completions",
        json.dumps({"model": SERVER.model, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {SERVER.key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())["choices"][0]


def loglikelihood(context: str, continuation: str) -> float:
    """Of a text behind another, by the offsets of its tokens."""
    told = complete(prompt=context + continuation, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    pairs = zip(told["text_offset"], told["token_logprobs"], strict=True)
    return sum(logprob for offset, logprob in pairs if offset >= len(context))


def tokenized_requests() -> None:
    check_run(tokenized=True)


def text_requests() -> None:
    check_run(tokenized=False)


def check_run(tokenized: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = evaluate(folder, tokenized)
        require(0 <= results["jaxserve_choice"]["acc,none"] <= 1, "acc is a share")
        num_right = 0
        for sample in samples(folder, "jaxserve_choice"):
            doc = sample["doc"]
            expected = [loglikelihood(doc["question"], f" {choice}") for choice in doc["choices"]]
            found = [float(reply[0][0]) for reply in sample["resps"]]
            close = all(abs(a - b) < 1e-3 for a, b in zip(found, expected, strict=True))
            require(close, f"log-likelihoods {found} are not {expected}")
            num_right += expected.index(max(expected)) == doc["answer"]
        equal(results["jaxserve_choice"]["acc,none"], num_right / 10, "acc")
        for sample in samples(folder, "jaxserve_generate"):
            text = complete(prompt=sample["doc"]["question"], max_tokens=8, stop=["\n", "."])[
                "text"
            ]
            equal(sample["resps"][0][0], text, "generated text")
        perplexity = results["jaxserve_perplexity"]["word_perplexity,none"]
        require(math.isfinite(perplexity) and perplexity > 1, f"perplexity {perplexity}")


run_checks({f.__name__: f for f in (tokenized_requests, text_requests)})
