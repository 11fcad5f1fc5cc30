"""Training with and without a capture, and what one example at a time gives at the parameters of each step.

A model that trains in float64 is held to autograd of one example at a time, to 1e-10 of the largest entry.  In float32,
autograd itself is off by some 1e-6 (one rounding in 2^24 for every operation of the backward), and differently for a
batch than for an example alone: there captured gradients and those of autograd are both compared with a float64 copy
of the model at the same parameters, and the former may be off by 1e-6 beyond twice what the latter are in that batch.
"""

import copy
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attrax.core import Block
from attrax.core.algebra import wide
from attrax.frontends import BackwardEvent, capture
from attrax.frontends.loop.capture import Capture

from .oracle import assert_gradients, assert_rounded, block_gradients

WORDS = (
    "the",
    "gull",
    "ran",
    "over",
    "a",
    "bay",
    "of",
    "salt",
    "and",
    "glass",
    "at",
    "noon",
    "while",
    "no",
    "bell",
    "rang",
)


def texts(count: int = 24) -> list[str]:
    """Sentences of several lengths."""
    gen = torch.Generator().manual_seed(5)
    pick = lambda n: torch.randint(len(WORDS), (n,), generator=gen).tolist()  # noqa: E731
    return [" ".join(WORDS[i] for i in pick(4 + k % 5)) for k in range(count)]


def tokenizer() -> Any:
    """A tokenizer of letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {t: i for i, t in enumerate([*special, " ", *string.ascii_lowercase])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore
    made.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama(vocab: int = 31, **options: Any) -> Any:
    """A Llama of two layers, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=vocab,
        intermediate_size=24,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{**size, **options},
    )
    return LlamaForCausalLM(config)


def label_losses(model: nn.Module, row: Mapping[str, Any]) -> Tensor:
    """Sum over the labels of a row of their negative log-likelihood."""
    logits = model(input_ids=row["input_ids"], attention_mask=row.get("attention_mask")).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(wide(logits.dtype)),
        row["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


def keep_double(patch: pytest.MonkeyPatch) -> None:
    """``x.float()`` leaves float64 as it is."""
    single = Tensor.float
    patch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


def whole(x: Tensor) -> Tensor:
    """A tensor, put together from the shards of all processes (FSDP2)."""
    return x.full_tensor() if isinstance(x, DTensor) else x


Example = Callable[[Mapping[str, Any], int], dict[str, Any]]


def one_row(inputs: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Example i of a call: its row."""
    return {k: v[i : i + 1] for k, v in inputs.items() if isinstance(v, Tensor) and v.ndim}


@dataclass
class Check:
    """Compares captured blocks with one-example-at-a-time autograd of a twin at the parameters of the step.

    Attributes:
        twin: A model like the one that is trained.
        loss: ``(model, example) -> loss`` of one example, which the trainer weighs by c; also of models in float64.
        example: Takes one example out of the inputs of a call.
        every: Which steps to check.
        blocks: Blocks seen.
        checked: Number of examples compared.
    """

    twin: nn.Module
    loss: Callable[[Any, Any], Tensor]
    example: Example = one_row
    every: int = 4
    blocks: list[Block] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    checked: int = 0

    def __post_init__(self) -> None:
        self.exact = copy.deepcopy(self.twin).double()

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Note the inputs of the calls that are trained on."""

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                names = list(type(module).forward.__code__.co_varnames)[1:]
                found = dict(zip(names, args, strict=False)) | kwargs
                self.calls.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items()})

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def backward(self, event: BackwardEvent) -> None:
        """Compare the first and the last example of every block, at the parameters of the backward."""
        calls, self.calls = self.calls, []
        if event.step % self.every == 0:
            with torch.enable_grad():
                self._compare(event, calls)

    def _compare(self, event: BackwardEvent, calls: list[dict[str, Any]]) -> None:
        assert len(calls) == len(event.blocks) > 0
        state = {name: whole(x) for name, x in event.model.state_dict().items()}
        for model in (self.twin, self.exact):
            model.load_state_dict(state)
        rounds = any(p.dtype != torch.float64 for p in event.model.parameters())
        for block, call in zip(event.blocks, calls, strict=True):
            found = block_gradients(block)
            assert block.examples.weight is not None
            alone = [(float(c), self.example(call, i)) for i, c in enumerate(block.examples.weight)]
            right = [self._gradients(self.exact, found, *one) for one in alone]
            own = [{n: g[i].double() for n, g in found.items()} for i in range(len(alone))]
            if rounds:
                assert_rounded(own, [self._gradients(self.twin, found, *one) for one in alone], right)
            else:
                for one, exact in zip(own, right, strict=True):
                    assert_gradients(one, exact)
            self.checked += len(alone)

    def _gradients(self, model: nn.Module, names: Iterable[str], c: float, example: Any) -> dict[str, Tensor]:
        named = {n: p for n, p in model.named_parameters() if n in set(names)}
        loss = c * self.loss(model, example)
        grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        return dict(zip(named, grads, strict=True))


def trained_alike(
    build: Callable[[], Any], train: Callable[..., Any], check: Callable[[Any], Check], **options: Any
) -> tuple[Check, Capture]:
    """Train twice, the second time inside a capture: the parameters are equal bit by bit, gradients are right.

    Args:
        build: Makes what is trained: a model.
        train: ``train(model)`` makes a trainer; it is told to start by what that returns: ``(start, options)``.
        check: Makes the check.
        options: Further options of the capture.
    """
    alone, model = build(), build()
    held = check(model)
    start, _ = train(alone)
    start()
    start, known = train(model)
    known = {**known, "sinks": [held.blocks.append, *known.get("sinks", ())]}
    known["after_backward"] = [*known.get("after_backward", ()), held.backward]
    with (
        held.listening(model),
        capture(model, **{**known, **options}) as running,
    ):
        start()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q), f"{name}: trained otherwise"
    assert held.checked
    return held, running
