"""An unmodified Hugging Face Trainer: training as without a capture, and what the capture recorded."""

import os
import unittest.mock
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from attrax.core import Block
from attrax.frontends import (
    capture,
    causal_lm,
    live,
    open_store,
    probe,
    store,
    trainer_callback,
    trainer_options,
)
from attrax.frontends.loop.capture import StepEvent
from attrax.methods import tracin

from .llms import in_float64  # noqa: F401
from .loops import known, summed
from .oracle import assert_gradients, block_gradients, captured, flat
from .trainers import Check, label_losses, one_row, trained_alike

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
VOCAB, STEPS = 13, 6


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Documents of several lengths, the same in every run; so few that they come again."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, VOCAB, (length,), generator=gen) for length in (5, 3, 6, 4, 2, 7, 9, 8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest, pads masked and without labels."""
    ids = [row["input_ids"] for row in rows]
    pad = lambda xs, value: torch.nn.utils.rnn.pad_sequence(xs, batch_first=True, padding_value=value)  # noqa: E731
    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad([torch.ones_like(x) for x in ids], 0),
        "labels": pad(ids, -100),
    }


def llama() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=12,
        max_position_embeddings=16,
        pad_token_id=0,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def doubled() -> Any:
    return llama().double()


def adapted() -> Any:
    """A frozen Llama with adapters, away from their initial zero."""
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(llama(), adapters)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


def still(build: Any = llama) -> Any:
    """A model without dropout, which would be drawn anew for one document at a time."""
    model = build()
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.0
    return model


def trainer(model: nn.Module, path: Path, accumulate: int, **options: Any) -> Trainer:
    kind = options.pop("kind", Trainer)
    arguments = TrainingArguments(
        str(path),
        max_steps=options.pop("max_steps", STEPS),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.05,
        lr_scheduler_type="linear",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        max_grad_norm=0.0,
        **options,
    )
    return kind(model=model, args=arguments, train_dataset=Documents(), data_collator=collate)


def trained(path: Path, accumulate: int, **options: Any) -> Any:
    model = doubled()
    trainer(model, path, accumulate, **options).train()
    return model


QUERIES = collate([{"input_ids": torch.tensor([1, 5, 2, 7])}, {"input_ids": torch.tensor([3, 3, 9])}])


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        (2, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ],
    ids=["1", "2", "nonreentrant", "reentrant-2"],
)
def test_trainer(accumulate, options, tmp_path, in_float64):  # noqa: F811
    """In float64, gradients add up to what the optimizer uses."""
    alone = trained(tmp_path, accumulate, **options)
    model, blocks, sums = doubled(), [], []

    def look(event: StepEvent) -> None:
        grads = {n: p.grad for n, p in event.model.named_parameters() if p.grad is not None}
        parts = [summed(block) for block in event.blocks]
        total = {n: torch.stack([part[n] for part in parts]).sum(0, keepdim=True) for n in grads}
        sums.append(len(event.blocks))
        assert_gradients(total, {n: g[None] for n, g in grads.items()})

    with capture(model, sinks=[blocks.append], before_step=[look]) as running:
        trainer(model, tmp_path, accumulate, **options).train()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q), f"{name}: trained otherwise"
    assert running.coverage.share == 1 and sums == [accumulate] * STEPS
    assert_recorded(blocks, accumulate)


def assert_recorded(blocks: list[Block], accumulate: int) -> None:
    """Weights, counts, steps and rates; the same document has the same id in every batch it is in."""
    assert [b.examples.step for b in blocks] == [k // accumulate for k in range(STEPS * accumulate)]
    rates = [0.05 * (1 - step / STEPS) for step in range(STEPS)]
    assert [b.examples.learning_rate for b in blocks] == pytest.approx(
        [r for r in rates for _ in range(accumulate)]
    )
    for step in range(STEPS):
        of_step = [known(b) for b in blocks if b.examples.step == step]
        total = sum(int(n.sum()) for _, n in of_step)
        for c, n in of_step:
            assert c.tolist() == pytest.approx([1 / total] * len(n))
    counts: dict[str, int] = {}
    for block in blocks:
        for name, count in zip(block.examples.ids, known(block)[1].tolist(), strict=True):
            assert counts.setdefault(name, count) == count
    assert sorted(counts.values()) == list(range(1, 9))


def test_gradients_of_a_step_are_those_of_the_documents_alone(in_float64):  # noqa: F811
    """Dropout aside: in eval mode the recorded rows are live gradients times their weight."""
    model, blocks = doubled(), []
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    documents = Documents()
    with capture(model, sinks=[blocks.append]):
        for rows in ([0, 1], [2, 1, 4]):
            model(**collate([documents[i] for i in rows])).loss.backward()
            model.zero_grad()
    single = [captured(live(model, [collate([documents[i]])])) for i in range(5)]
    for block, rows in zip(blocks, ([0, 1], [2, 1, 4]), strict=True):
        c = known(block)[0][0]
        right = {n: torch.cat([single[i][n] for i in rows]) * c for n in single[0]}
        assert_gradients(block_gradients(block), right)


def test_tracin_of_a_trainer_run(tmp_path):
    """From two stores, without the model, against the formula at each step."""
    right: list[Tensor] = []

    def dense(event: StepEvent) -> None:
        modes = {m: m.training for m in event.model.modules()}
        event.model.eval()
        with event.capture.paused():
            queries = flat(captured(live(event.model, [QUERIES])))
        for module, mode in modes.items():
            module.training = mode
        assert event.learning_rate is not None
        right.extend(event.learning_rate * flat(block_gradients(b)) @ queries.T for b in event.blocks)

    model = llama()
    query, train = (store(tmp_path / side, keep_factored=True) for side in ("query", "train"))
    with query, capture(model, sinks=[train], before_step=[probe([QUERIES], query, causal_lm()), dense]):
        trainer(model, tmp_path / "run", 2).train()
    del model
    scores = tracin(open_store(tmp_path / "train"), open_store(tmp_path / "query"))
    expected = torch.cat(right)
    assert len(scores) == len(expected) == STEPS * 4 and len(set(scores.ids)) == 8
    torch.testing.assert_close(scores.values, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("build", [llama, adapted], ids=["llama", "adapters"])
def test_twenty_steps(build, tmp_path):
    """One document at a time gives the same gradients up to the rounding of float32, see `assert_rounded`.

    The model's own loss divides by all tokens of the step.
    """
    assert_twenty_steps(lambda: still(build), tmp_path)


@pytest.mark.parametrize("build", [llama, adapted], ids=["llama", "adapters"])
def test_twenty_steps_in_float64(build, tmp_path, in_float64):  # noqa: F811
    """One document at a time gives the same gradients to 1e-10."""
    assert_twenty_steps(lambda: still(build).double(), tmp_path)


def assert_twenty_steps(build: Callable[[], Any], path: Path) -> None:
    def train(model: Any) -> Any:
        made = trainer(model, path, 2, max_steps=20)
        return made.train, trainer_options(made)

    check, running = trained_alike(build, train, lambda model: Check(build(), label_losses))
    assert running.coverage.share == 1 and len(check.blocks) == 40
    assert len({i for b in check.blocks for i in b.examples.ids}) == 8


class OwnLoss(Trainer):
    """The mean over documents of their summed losses, and no division by micro-batches where the model takes counts."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits, labels = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits, inputs["labels"]
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        ) / len(labels)


def with_labels(inputs: Any, i: int) -> Any:
    row = one_row(inputs, i)
    return {**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("divides", [False, True])
def test_a_loss_of_the_callers_own(divides, tmp_path, in_float64):  # noqa: F811
    """In float64, to 1e-10."""

    def build() -> Any:
        return still().double()

    def train(model: Any) -> Any:
        made = trainer(model, tmp_path, 2, kind=OwnLoss)
        made.model_accepts_loss_kwargs = not divides
        return made.train, trainer_options(made, loss="example_mean")

    check, _ = trained_alike(build, train, lambda model: Check(build(), label_losses, with_labels))
    assert {float(c) for b in check.blocks for c in b.examples.weight} == {0.25 if divides else 0.5}  # type: ignore


def test_a_callback_captures_while_it_trains(tmp_path):
    blocks: list[Block] = []
    model = llama()
    made, callback = trainer(model, tmp_path, 1), trainer_callback("transformers", sinks=[blocks.append])
    made.add_callback(callback)
    made.train()
    assert [b.examples.step for b in blocks] == list(range(STEPS)) and known(blocks[0])[0].isfinite().all()
    assert not any(m._forward_hooks for m in model.modules())


def test_a_callback_is_closed_after_an_exception(tmp_path):
    """The trainer tells its callbacks nothing of an exception."""
    blocks: list[Block] = []
    model = llama()
    made, callback = trainer(model, tmp_path, 1), trainer_callback("transformers", sinks=[blocks.append])
    made.add_callback(callback)
    made.add_callback(Fails())
    for _ in range(2):
        with pytest.raises(KeyError, match="step 3"):
            made.train()
    assert [b.examples.step for b in blocks] == [0, 1, 2] * 2
    callback.close()
    assert not any(m._forward_hooks for m in model.modules())


def test_a_callback_whose_store_is_closed_does_not_train_again(tmp_path):
    made = trainer(llama(), tmp_path, 1, max_steps=1)
    made.add_callback(trainer_callback("transformers", sinks=[store(tmp_path / "kept")]))
    made.train()
    with pytest.raises(RuntimeError, match="its store was closed when the training before ended"):
        made.train()


@pytest.mark.filterwarnings("ignore:store. run 'job'")
@pytest.mark.parametrize("done", [None, 4])
def test_a_callback_of_a_training_that_goes_on(done, tmp_path):
    """What counts from 0 though the trainer does not is told of."""
    before = trainer(llama(), tmp_path, 1, max_steps=4)
    before.train()
    before._save_checkpoint(before.model, None)
    made = trainer(llama(), tmp_path, 1, max_steps=6)
    sinks = [store(tmp_path / "kept", run="job", steps_done=done)]
    made.add_callback(trainer_callback("transformers", sinks=sinks))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    texts = [str(w.message) for w in told if "trainer_callback" in str(w.message)]
    assert open_store(tmp_path / "kept").steps() == ((0, 1) if done is None else (4, 5))
    if done is None:
        assert len(texts) == 1 and "begins at step 4" in texts[0] and "steps_done=4" in texts[0]
    else:
        assert not texts


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyError("step 3")


def test_callbacks_of_unknown_frameworks_and_unknown_trainers():
    with pytest.raises(ValueError, match="got 'keras'"):
        trainer_callback("keras")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="builtins.int is not known"):
        trainer_options(3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_trainer(tmp_path):
    """The trainer compiles the model after the capture was entered: hooks are there, between compiled regions.

    In float32: see `assert_rounded`.
    """
    torch._dynamo.reset()
    model, blocks = still(), []
    with unittest.mock.patch.dict(os.environ):  # in which the options are left
        made = trainer(model, tmp_path, 1, torch_compile=True, torch_compile_backend="aot_eager")
    check = Check(still(), label_losses)
    with (
        check.listening(model),
        capture(model, sinks=[blocks.append], after_backward=[check.backward]) as running,
    ):
        made.train()
    assert running.coverage.share == 1 and len(blocks) == STEPS and check.checked
    torch._dynamo.reset()
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # it would compile the models of later accelerators
