"""Training with and without a capture, and what one example at a time gives at the parameters of each step."""

import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.core import Block
from attrax.frontends import BackwardEvent, capture
from attrax.frontends.capture import Capture

from .oracle import assert_gradients, block_gradients

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
        logits[:, :-1].flatten(0, 1).float(),
        row["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


Example = Callable[[Mapping[str, Any], int], dict[str, Any]]


def one_row(inputs: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Example i of a call: its row."""
    return {k: v[i : i + 1] for k, v in inputs.items() if isinstance(v, Tensor) and v.ndim}


@dataclass
class Check:
    """Compares captured blocks with one-example-at-a-time autograd of a twin at the parameters of the step.

    Attributes:
        twin: A model like the one that is trained.
        loss: ``(model, example) -> loss`` of one example, which the trainer weighs by c.
        example: Takes one example out of the inputs of a call.
        within: Largest error, relative to the largest entry of a parameter's gradient.
        every: Which steps to check.
        blocks: Blocks seen.
        checked: Number of examples compared.
    """

    twin: nn.Module
    loss: Callable[[Any, Any], Tensor]
    example: Example = one_row
    within: float = 1e-6
    every: int = 4
    blocks: list[Block] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    checked: int = 0

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
        twin = self.twin
        twin.load_state_dict(event.model.state_dict())
        for block, call in zip(event.blocks, calls, strict=True):
            found = block_gradients(block)
            assert block.examples.weight is not None
            for i in {0, len(block.examples) - 1}:
                named = {n: p for n, p in twin.named_parameters() if n in found}
                total = float(block.examples.weight[i]) * self.loss(twin, self.example(call, i))
                grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
                right = {
                    n: torch.zeros_like(p) if g is None else g
                    for (n, p), g in zip(named.items(), grads, strict=True)
                }
                assert_gradients(
                    {n: g[i].to(right[n].dtype) for n, g in found.items()},
                    right,
                    self.within,
                    zero=0.01 * self.within,
                )
                self.checked += 1


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
    known = {**known, "sinks": [held.blocks.append]}
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
