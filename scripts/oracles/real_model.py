"""What transformers says of a fetched model: token ids, greedy tokens and their log-probabilities in float32;
called by `scripts/make_oracles`.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "def fibonacci(n):\n",
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Zw\u00f6lf Boxk\u00e4mpfer \u6f22\u5b57 \U0001f600  it's 2^10\n\n",
]
CHAT = "Add 2 and 3."
NUM_GREEDY = 12


def make_golden(directory: Path) -> dict[str, Any]:
    """Of each text its ids, the greedy tokens after it, the log-probability of each and what they say."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = []
    for text in TEXTS:
        prompt = tokenizer(text).input_ids
        found = model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_GREEDY,
            eos_token_id=None,
            repetition_penalty=1.0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = found.sequences[0, len(prompt) :].tolist()
        rows = [torch.log_softmax(row[0].double(), dim=-1) for row in found.logits]
        best = [torch.topk(row, 2).values for row in rows]
        texts.append(
            {
                "text": text,
                "token_ids": prompt,
                "greedy": ids,
                "says": tokenizer.decode(ids),
                "logprobs": [
                    round(row[token].item(), 6) for row, token in zip(rows, ids, strict=True)
                ],
                "gap": round(min((first - second).item() for first, second in best), 4),
            }
        )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT}], add_generation_prompt=True, tokenize=False
    )
    chat_ids = tokenizer(chat, add_special_tokens=False).input_ids
    return {"texts": texts, "chat": {"user": CHAT, "token_ids": chat_ids}}
