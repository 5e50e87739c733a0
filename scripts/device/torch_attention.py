"""The peer of scripts/device_check: torch's scaled_dot_product_attention over dense keys and values.

Reads shapes as JSON from stdin and prints seconds a call as JSON; a process of its own, so that jax
and torch do not meet. Ends with 3 where there is no torch, or no GPU for it.
"""

import json
import sys
import time


def main() -> int:
    try:
        import torch
        from torch.nn.attention.bias import causal_lower_right
    except ImportError:
        print("torch is not installed", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("torch finds no GPU", file=sys.stderr)
        return 3
    request = json.load(sys.stdin)
    num_heads, kv_heads, head_dim = request["heads"]
    seconds = {}
    for name, (rows, tokens, context) in request["shapes"].items():
        make = {"device": "cuda", "dtype": getattr(torch, request["dtype"])}
        q = torch.randn(rows, num_heads, tokens, head_dim, **make)
        k, v = (torch.randn(rows, kv_heads, context, head_dim, **make) for _ in range(2))
        mask = causal_lower_right(tokens, context) if tokens > 1 else None

        def call(q=q, k=k, v=v, mask=mask):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            )

        for _ in range(3):
            call()
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 10)
        seconds[name] = min(times)
    print(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
