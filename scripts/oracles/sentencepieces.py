"""A tiny SentencePiece BPE with bytes for unknown characters, made as Llama 2's was, and how the library
itself encodes texts with it; called by `scripts/make_oracles`.
"""

import io
from typing import Any

import sentencepiece

VOCAB_SIZE = 420
TRAINING = (
    """The server keeps the keys and values of every token in pages. A page holds a fixed run of tokens.
When a request comes in, the scheduler looks for pages that already hold the start of its prompt.
Once upon a time there was a little girl named Ada who loved to count: the stars and the stones.
The capital of France is Paris, and 1 + 2 = 3; 10 pages of 16 tokens are 160 tokens.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va très bien à Noël.
"""
    * 4
)
TEXTS = [
    "",
    "a",
    " a",
    "  two  spaces  ",
    "The keys and values of every token",
    "line\nbreaks\n\nand\ttabs\n",
    "Ada counted 1234567 stones, 10 pages at 16 tokens: 3.14159!",
    "Zwölf große Deiche, Noël",
    "unseen: 漢字 and \U0001f600 and \u0416",
    "xqzj XQZJ qqqq",
    "tokenstokenstokens pagespages",
]
# As the `gguf` package numbers the kinds of tokens.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def make_sentencepiece() -> dict[str, Any]:
    """Pieces, scores and kinds as a GGUF file has them, and the ids of `TEXTS`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.99,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def kind(number: int) -> int:
        if processor.is_unknown(number):
            return UNKNOWN
        if processor.is_control(number):
            return CONTROL
        return BYTE if processor.is_byte(number) else NORMAL

    numbers = range(processor.vocab_size())
    return {
        "made_by": f"sentencepiece {sentencepiece.__version__}",
        "tokens": [processor.id_to_piece(number) for number in numbers],
        "scores": [processor.get_score(number) for number in numbers],
        "kinds": [kind(number) for number in numbers],
        "texts": [{"text": text, "ids": processor.encode(text)} for text in TEXTS],
    }
