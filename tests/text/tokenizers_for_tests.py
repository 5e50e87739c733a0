"""Small tokenizers of the kinds that checkpoints have, made with the `tokenizers` library."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.text.chat_template import TemplateSource
from jaxserve.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(merges: list[str] | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE like GPT-2's: 256 bytes, a few merges, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    pairs = []
    for merge in merges or ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "o r", "Ġ Ã"]:
        left, right = merge.split(" ")
        pairs.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A BPE like Llama 2's: ▁ for spaces, byte fallback, the first space stripped when decoding."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for token in ["▁", "a", "b", "c", "é", "▁a", "▁b", "ab", "▁▁", "▁▁▁▁", "▁ab", "."]:
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁", "ab")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram_metaspace() -> tokenizers.Tokenizer:
    """A Unigram model with a Metaspace decoder, as T5 and some Japanese models have."""
    pieces = ["▁", "a", "b", "▁a", "▁b", ".", "▁.", "'", "▁'", "s", "n't", "▁n't", "日", "▁▁", ","]
    vocab = [("<unk>", 0.0), *((piece, -float(i + 1)) for i, piece in enumerate(pieces))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A WordPiece model, whose decoder puts a space before every token but the first."""
    words = ["[UNK]", "a", "##a", "b", "##b", ".", "'", "s", "##é", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def wrap(tokenizer: tokenizers.Tokenizer, template: TemplateSource = None, **config) -> Tokenizer:
    """Our tokenizer over one of the above."""
    return Tokenizer(tokenizer.to_str(), config, template)


def write(directory: Path, tokenizer: tokenizers.Tokenizer, **config) -> Path:
    """The files of a checkpoint directory; returns the directory."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
