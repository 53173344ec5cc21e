"""A tokenizer learnt from texts: byte-level BPE, as GPT-2's and Llama 3's are."""

from collections.abc import Iterable

from jspec.weights.tokenizers.tokenizer import Tokenizer

NUM_BYTES = 256


def learn_bpe(texts: Iterable[str], vocab_size: int, *, bos: str, eos: str) -> Tokenizer:
    """Returns a tokenizer; the same texts give the same one.

    Args:
      texts: what to learn from.
      vocab_size: ids, all bytes and the two ends among them; fewer where the texts are too short to
        have as many pairs of tokens.
      bos: the token that begins a text, put before every one.
      eos: the token that ends one; it is not added.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

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
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return Tokenizer(backend, special_tokens={"bos_token": bos, "eos_token": eos})
