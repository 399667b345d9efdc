"""A tiny model made in place: deep and thin, random weights, one token per character.

For demonstrations and tests without a download. Depth over width makes a verification of several
tokens almost as cheap as of one, as it is for real models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.directories import whole_directory
from ratoon.models.hf_config import write_json
from ratoon.models.hf_io import save_decoder
from ratoon.models.initialise import normal_decoder

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<sep>")
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
# One separator instead of role names: at one token per character, a header would cost a sentence.
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ message['content'] + ('<eos>' if message['role'] == 'assistant' else '<sep>') }}"
    "{% endfor %}"
)


def make_tiny_model(
    path: Path | str,
    *,
    seed: int = 0,
    characters: Sequence[str] = PRINTABLE,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random Llama with a character-level tokenizer as a Hugging Face directory.

    Args:
        path: a path that does not exist yet.
        seed: of the weights; the same seed gives the same bits.
        characters: what the model can read and write; others become `<pad>`.
        hidden_size: width D.
        intermediate_size: inner width of the MLP.
        num_layers: depth L.
        num_heads: query heads; they divide `hidden_size` into even parts.
        num_kv_heads: key/value heads; they divide `num_heads`.
        max_positions: context, in tokens.
        dtype: of the stored weights.

    Raises:
        CheckpointError: if `path` holds something already.
    """
    directory = Path(path)
    config = DecoderConfig(
        family="llama",
        vocab_size=len(SPECIAL_TOKENS) + len(characters),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_positions=max_positions,
        bos_id=SPECIAL_TOKENS.index("<bos>"),
        eos_ids=(SPECIAL_TOKENS.index("<eos>"),),
        pad_id=SPECIAL_TOKENS.index("<pad>"),
    )
    with whole_directory(directory) as part:
        save_decoder(random_decoder(config, seed), part / "model", dtype=dtype)
        for file in (part / "model").iterdir():
            file.replace(part / file.name)
        (part / "model").rmdir()
        _write_tokenizer(part, characters, max_positions)
    return directory


def random_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder with normal weights of variance 1 / fan-in, so that narrow models learn at once.

    Matrices that write to the residual stream shrink with depth. A width of 64 with the customary
    standard deviation of 0.02 learned the task of `data.arithmetic` several times more slowly.

    Source: the shrinking is that of GPT-2 (Radford et al. 2019, section 2.3).
    """
    shrink = float((2 * config.num_layers) ** -0.5)

    def deviation(matrix: Tensor, is_residual: bool) -> float:
        return float(matrix.shape[1] ** -0.5) * (shrink if is_residual else 1.0)

    return normal_decoder(config, seed, deviation)


def _write_tokenizer(directory: Path, characters: Sequence[str], max_positions: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    # Byte-pair encoding without merges splits text into characters.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", settings)
