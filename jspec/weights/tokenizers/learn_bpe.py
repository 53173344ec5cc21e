"""A tokenizer learnt from texts: byte-level BPE, as in GPT-2 and Llama 3."""

from collections.abc import Iterable

from jspec.weights.tokenizers.tokenizer import Tokenizer, add_bos

NUM_BYTES = 256


def learn_bpe(texts: Iterable[str], vocab_size: int, *, bos: str, eos: str) -> Tokenizer:
    """Returns a tokenizer of `vocab_size` ids, all bytes, `bos` and `eos` included.

    The same texts give the same one; short texts, with fewer pairs of tokens, give fewer ids. Every
    encoded text begins with `bos`; `eos` is not added.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[bos, eos],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    add_bos(backend, bos, True)
    return Tokenizer(backend, special_tokens={"bos_token": bos, "eos_token": eos})
