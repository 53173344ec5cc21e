"""A tokenizer learnt from texts: byte-level BPE, as in GPT-2 and Llama 3."""

from collections.abc import Iterable

from jspec.weights.tokenizers.tokenizer import Tokenizer, add_bos

NUM_BYTES = 256


def learn_bpe(texts: Iterable[str], vocab_size: int, *, bos: str, eos: str) -> Tokenizer:
    """Returns a tokenizer of `vocab_size` ids, all bytes, `bos` and `eos` included.

    The same texts give the same one; short texts, with fewer pairs of tokens, give fewer ids. Every
    encoded text begins with `bos`; `eos` is not added.
    """
    import tokenizers

    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator(
        texts, vocab_size, min_frequency=0, special_tokens=[bos, eos], show_progress=False
    )
    backend = tokenizers.Tokenizer.from_str(learnt.to_str())
    add_bos(backend, bos, True)
    return Tokenizer(backend, special_tokens={"bos_token": bos, "eos_token": eos})
