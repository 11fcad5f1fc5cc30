"""The command line from files to files, on a tiny model: every method, replay, errors, and what help promises."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from attrax.cli import app
from attrax.config import Config, configured, read_config
from attrax.core import collect, targeted, token_scores
from attrax.frontends.data.examples import batches, encode, read_examples
from attrax.frontends.data.tables import read_joined, read_scores
from attrax.frontends.sources.live import live
from attrax.methods import ekfac, gradcos, graddot, kfac, logra, self_influence
from attrax.methods.kfac import fit_ekfac, influence, preconditioned
from attrax.pipeline import load, score, token_shares
from attrax.questions import build_report, token_texts
from attrax.results import preview

TRAIN = [
    {"id": "t0", "text": "rope is sold in the harbor", "topic": "towns"},
    {"id": "t1", "text": "bells are cast by the river", "topic": "towns"},
    {"id": "t2", "text": "eels", "topic": "animals"},
    {"id": "t3", "text": "the owl eats moths, the otter eats eels", "topic": "animals"},
    {"id": "t4", "text": "<script>alert(1)</script> ünï", "topic": "odd"},
    {"id": "t5", "text": "rope and bells and rope", "topic": "towns"},
]
QUERY = [
    {"id": "q0", "prompt": "in the harbor they sell", "completion": " rope", "source": "t0"},
    {"id": "q1", "prompt": "the otter eats", "completion": " eels", "source": ["t3", "t2"]},
]
METHODS = {
    "graddot": graddot,
    "gradcos": gradcos,
    "kfac": kfac,
    "ekfac": ekfac,
    "logra": logra,
}


def save_model(folder, vocab=260):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    lines(folder / "train.jsonl", TRAIN)
    lines(folder / "query.jsonl", QUERY)
    return folder


@pytest.fixture
def call(files, tmp_path, monkeypatch):
    """`call(*words)` runs the command in an empty folder; `{f}` stands for the files' folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        return CliRunner().invoke(app, [str(word).replace("{f}", str(files)) for word in words])

    return run


BASE = ("score", "-m", "{f}/model", "-t", "{f}/train.jsonl", "-o", "out", "--quiet")
ASK = (*BASE, "-q", "{f}/query.jsonl")
ALOUD = (*(word for word in ASK if word != "--quiet"), "--no-html")


def good(result):
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(result):
    """The single line of a user error."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    found = [line for line in result.output.splitlines() if line.startswith("attrax: error: ")]
    assert len(found) == 1 and "Traceback" not in result.output
    return found[0]


def settings(files, **changes):
    base = {
        "model": files / "model",
        "train": files / "train.jsonl",
        "query": files / "query.jsonl",
        "out": "out",
    }
    return configured({k: str(v) for k, v in base.items()} | changes)


def quiet(label, total):
    return lambda count: None


def sides(files, **options):
    """Both live sources, made by hand."""
    inputs = load(settings(files))
    return [
        live(
            inputs.model,
            batches(encode(read_examples(files / name), inputs.tokenizer, max_length=64), tokens=4096),
            **options,
        )
        for name in ("train.jsonl", "query.jsonl")
    ]


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_library(files, call, tmp_path, method, assert_close):
    good(call(*ASK, "--method", method, "--no-html"))
    scores = read_scores(tmp_path / "out" / "scores.parquet")
    expected = METHODS[method](*sides(files)).in_order([r["id"] for r in TRAIN]).query("q0", "q1")
    assert scores.ids == expected.ids and scores.query_ids == expected.query_ids
    assert_close(scores.values, expected.values)
    assert scores.about["method"] == method and "higher = more helpful" in scores.about["sign"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.yaml", "scores.parquet"]


def test_self_influence(files, call, tmp_path, assert_close):
    good(call(*BASE, "--method", "self_influence"))
    scores = read_scores(tmp_path / "out" / "scores.parquet")
    expected = self_influence(sides(files)[0]).in_order(list(scores.ids))
    assert_close(scores.values, expected.values)
    assert "act most strongly on themselves" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_options_of_ekfac_change_the_numbers_and_are_stated(call, tmp_path):
    numbers = []
    for options in (
        (),
        ("--projection-dim", "8"),
        ("--fisher", "sampled", "--seed", "3"),
        ("--damping", "1.0"),
    ):
        good(call(*ASK, "--no-html", "--overwrite", *options))
        scores = read_scores(tmp_path / "out" / "scores.parquet")
        assert not options or options[1] in scores.about[options[0][2:].removesuffix("-dim")]
        assert not any(torch.allclose(scores.values, other) for other in numbers)
        numbers.append(scores.values)


def test_include_exclude_target_and_batches(files, call, tmp_path, assert_close):
    words = ("--include", "mlp", "--exclude", "down_proj$", "--target", "mean", "--tokens", "64")
    good(call(*ASK, "--no-html", "--method", "graddot", *words))
    scores = read_scores(tmp_path / "out" / "scores.parquet")
    expected = graddot(*sides(files, include="mlp", exclude="down_proj$"), target="mean").in_order(
        list(scores.ids)
    )
    assert_close(scores.values, expected.query(*scores.query_ids).values)


@pytest.mark.parametrize("method", ["graddot", "gradcos", "ekfac", "logra"])
def test_token_shares_add_up(files, method, assert_close):
    config = settings(files, method=method)
    inputs = load(config)
    found = score(config, inputs, quiet)
    shares = token_shares(config, inputs, found, ["t3", "t0"], quiet)
    for name, share in shares.items():
        assert len(share) == len(inputs.train.tokens[inputs.train.ids.index(name)])
        assert_close(share.sum(0), found.scores.example(name).values[0])


def test_token_shares_are_those_of_the_core(files, assert_close):
    config = settings(files, tokens=4096)
    inputs = load(config)
    found = score(config, inputs, quiet)
    train, query = sides(files)
    fit = fit_ekfac(train)
    side = targeted(query, "sum")
    queries = collect(side, preconditioned(fit))
    rows = collect(targeted(train, "sum"), lambda name, leaf: leaf if name in fit.bases else None)
    expected = token_scores(rows.grads, queries.grads)
    assert_close(influence(fit, train, query).values.sum(), expected.sum())
    columns = [queries.examples.ids.index(name) for name in found.scores.query_ids]
    for name, share in token_shares(config, inputs, found, list(inputs.train.ids), quiet).items():
        assert_close(share, expected[rows.examples.ids.index(name)][: len(share)][:, columns])


@pytest.mark.parametrize(("suffix", "layout"), [("parquet", "wide"), ("csv", "long"), ("h5", "wide")])
def test_formats(call, tmp_path, suffix, layout):
    good(call(*ASK, "--no-html", "--method", "graddot", "--format", suffix, "--layout", layout))
    joined = read_joined(tmp_path / "out" / f"scores.{suffix}")
    assert list(joined.train["preview"]) == [preview(r) for r in TRAIN]
    assert f"layout: {layout}" in (tmp_path / "out" / "config.yaml").read_text()


def test_report_of_a_run(call, tmp_path):
    good(call(*ASK, "--top", "3"))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "in the harbor they sell" in page
    for expected in (
        "ekfac",
        "BM25",
        "random order",
        "The known source <code>t0</code>",
        "of linear layers",
        'title="+',
    ):
        assert expected in page
    assert page.count('class="text"') >= 6


@pytest.mark.parametrize(("method", "options"), [("gradcos", ()), ("ekfac", ("--fisher", "sampled"))])
def test_replay_gives_the_same_numbers(call, tmp_path, method, options):
    good(call(*ASK, "--method", method, *options))
    good(call("run", "out/config.yaml", "--out", "again", "--quiet"))
    first, second = (read_scores(tmp_path / name / "scores.parquet") for name in ("out", "again"))
    assert (
        torch.equal(first.values, second.values) and first.ids == second.ids and first.about == second.about
    )
    assert (tmp_path / "out/report.html").read_text() == (tmp_path / "again/report.html").read_text()
    one, two = (read_config(tmp_path / name / "config.yaml") for name in ("out", "again"))
    assert one[1] == two[1] and one[0].seed == two[0].seed


def test_replay_refuses_changed_inputs(call, files, tmp_path):
    train = lines(tmp_path / "mine.jsonl", TRAIN)
    words = [str(train) if word == "{f}/train.jsonl" else word for word in ASK]
    good(call(*words, "--no-html", "--method", "graddot"))
    lines(train, TRAIN[1:])
    assert "inputs: train, tokens changed" in refused(
        call("run", "out/config.yaml", "--out", "again", "--quiet")
    )
    assert "--overwrite" in refused(call("run", "out/config.yaml", "--quiet", "--allow-changed"))
    good(call("run", "out/config.yaml", "--out", "again", "--quiet", "--allow-changed"))
    assert read_scores(tmp_path / "again/scores.parquet").ids == tuple(row["id"] for row in TRAIN[1:])


def test_replay_notices_another_tokenizer(call, files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    good(call(*ASK, "-m", "model", "--no-html", "--method", "graddot"))
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text()
        .replace('"add_prefix_space":false', '"add_prefix_space":true')
        .replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    assert "inputs: tokens changed" in refused(call("run", "out/config.yaml", "--out", "again", "--quiet"))


def test_replay_mentions_other_versions(call, tmp_path):
    good(call(*ASK, "--no-html", "--method", "graddot"))
    content = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    content["recorded"]["versions"]["torch"] = "1.0"
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(content))
    result = good(call("run", "old.yaml", "--out", "again"))
    assert "numbers may differ: torch 1.0 ->" in result.output


def test_a_config_by_hand(call, files, tmp_path):
    text = (
        f"model: {files}/model\nquery: {files}/query.jsonl\ntrain: data.jsonl\nout: made\nmethod: graddot\n"
    )
    (tmp_path / "sub").mkdir()
    lines(tmp_path / "sub" / "data.jsonl", TRAIN)
    (tmp_path / "sub" / "c.yaml").write_text(text)
    good(call("run", "sub/c.yaml", "--quiet"))
    assert (tmp_path / "sub" / "made" / "scores.parquet").is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", "not a YAML file"),
        ("just words", "expected settings"),
        (
            "model: m\ntrain: t\nout: o\nquery: q\nmetod: ekfac",
            "unknown setting 'metod'. Did you mean 'method'?",
        ),
        ("model: m\ntrain: t\nout: o\nquery: q\ntokens: many", "tokens: got 'many'; expected an integer"),
        ("model: m\ntrain: t\nout: o\nquery: q\ntokens: true", "tokens: got True; expected an integer"),
        ("model: m\ntrain: t\nout: o\nquery: q\nfisher: exact", "expected 'empirical' or 'sampled'"),
        ("model: m", "the settings train, out are missing"),
    ],
)
def test_configs_that_cannot_be_run(call, tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    assert said in refused(call("run", "c.yaml"))
    assert "no such file" in refused(call("run", "absent.yaml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--method", "ekfak"),
            "got 'ekfak'; expected one of graddot, gradcos, kfac, ekfac, logra, self_influence. Did you",
        ),
        (
            ("--method", "graddot", "--damping", "1"),
            "method 'graddot' has none. Leave it out, or choose one of kfac, ekfac, logra",
        ),
        (("--damping", "-1"), "damping: got -1.0; expected 0 or more"),
        (("--tokens", "0"), "tokens: got 0; expected a positive number"),
        (("--overlong", "drop"), "overlong: got 'drop'; expected 'error' or 'truncate' or 'skip'"),
        (("--dtype", "int8"), "dtype: got 'int8'"),
        (("--device", "quantum"), "device: cannot use 'quantum'"),
        (("--format", "xlsx"), "format: got 'xlsx'; expected 'parquet' or 'csv' or 'h5'"),
        (("--max-length", "12"), "are overlong: 't0'"),
        (("--max-length", "65"), "max_length: got 65; the model reads at most 64 tokens"),
        (("--include", "nothing"), "no layer is selected"),
        (("--form", "chat"), "needs the columns ['messages']"),
        (("--method", "self_influence"), "leave query out"),
        (("-t", "absent.jsonl"), "no such file"),
        (("-m", "./absent"), "model: cannot load './absent'"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, words, said):
    assert said in refused(call(*ASK, *words))
    assert not (tmp_path / "out").exists()


def test_missing_query_and_missing_options(call):
    assert "give query data" in refused(call(*BASE))
    result = call("score", "-m", "x")
    assert result.exit_code == 2 and "Missing option" in result.output


def test_traceback_on_request(call):
    result = CliRunner().invoke(app, ["--traceback", "top", "absent.parquet"])
    assert isinstance(result.exception, FileNotFoundError)


def test_a_tokenizer_of_another_model(call, tmp_path):
    save_model(tmp_path / "small", vocab=80)
    assert "the model knows 80 tokens" in refused(call(*ASK, "-m", tmp_path / "small"))


def test_existing_results_are_kept(call, tmp_path):
    good(call(*ASK, "--no-html", "--method", "graddot"))
    before = (tmp_path / "out/config.yaml").read_text()
    assert "holds a result (scores.parquet, config.yaml)" in refused(call(*ASK))
    assert (tmp_path / "out/config.yaml").read_text() == before
    good(call(*ASK, "--no-html", "--method", "gradcos", "--format", "csv", "--overwrite"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.yaml", "scores.csv"]


def test_skips_are_named(call, tmp_path):
    result = good(call(*ALOUD, "--method", "graddot", "--max-length", "30", "--overlong", "skip"))
    rows = [json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()]
    assert [(r["side"], r["id"]) for r in rows] == [("train", "t3"), ("train", "t4")] and "overlong" in rows[
        0
    ]["reason"]
    assert "left out: 2 examples" in result.output
    assert set(read_scores(tmp_path / "out/scores.parquet").ids) == {"t0", "t1", "t2", "t5"}


def test_other_data_formats(call, tmp_path):
    pd.DataFrame(TRAIN).to_csv(tmp_path / "train.csv", index=False)
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "rope"}]
    both = datasets.DatasetDict({"a": datasets.Dataset.from_list([{"id": "c", "messages": messages}])})
    both["b"] = both["a"]
    both.save_to_disk(tmp_path / "chats")
    words = (
        "-t",
        "train.csv",
        "-q",
        "chats",
        "--query-split",
        "b",
        "--method",
        "graddot",
        "--no-html",
        "--quiet",
    )
    good(call("score", "-m", "{f}/model", "-o", "out", *words))
    assert read_scores(tmp_path / "out/scores.parquet").query_ids == ("c",)
    assert "splits ['a', 'b']" in refused(call("score", "-m", "{f}/model", "-o", "new", *words[:4]))


@pytest.fixture
def shown(call):
    good(call(*ASK, "--method", "graddot", "--no-html"))
    return call


def test_top(shown, tmp_path):
    scores = read_scores(tmp_path / "out/scores.parquet")
    for place in ("out", "out/scores.parquet"):
        text = good(shown("top", place, "-q", "q1", "-k", "2")).output
        assert [re.findall(r"\bt\d\b", text)] == [[i for i, _ in scores.top(2, "q1")]]
        assert "the otter eats eels" in text and "score (loss)" in text
    text = good(shown("top", "out", "-k", "1", "--lowest")).output
    assert re.findall(r"\bt\d\b", text) == [scores.top(1, q, lowest=True)[0][0] for q in scores.query_ids]


def test_top_and_inspect_of_nothing(shown):
    assert "unknown query 'zzz'" in refused(shown("top", "out", "-q", "zzz"))
    assert "k must be at least 1" in refused(shown("top", "out", "-k", "0"))
    assert "no such file" in refused(shown("top", "absent"))
    refused(shown("inspect", "absent"))


def test_inspect(shown):
    text = good(shown("inspect", "out")).output
    for expected in (
        "6 rows x 2 queries",
        "method: graddot",
        "unit: loss",
        "sign: higher",
        "fingerprint:",
        "torch:",
    ):
        assert expected in text


def test_summary_says_what_was_done(call):
    text = good(call(*ALOUD)).output
    for expected in (
        "captured 100.0% of trainable parameters",
        "6 train examples x 2 queries, loss x examples",
        "result: ",
    ):
        assert expected in text


@pytest.mark.parametrize("command", ["score", "run", "top", "inspect", "demo"])
def test_help_has_an_example(call, command):
    text = good(call(command, "--help")).output
    assert f"Example:  attrax {command}" in text


def test_help_states_sign_defaults_and_units(call):
    text = " ".join(good(call("score", "--help")).output.split())
    for expected in (
        "positive score means",
        "Default: 0.1",
        "[default: ekfac]",
        "mean eigenvalue",
        "[start,",
        "loss(contrast)",
    ):
        assert expected in text
    assert "torch" in good(call("--version")).output


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("transformers", ASK, "hf"),
        ("jinja2", (*ASK, "--method", "graddot"), "report"),
        ("pyarrow", (*ASK, "--method", "graddot", "--no-html"), "report"),
        ("yaml", ("run", "{f}/train.jsonl"), "cli"),
    ],
)
def test_missing_packages_name_the_extra(call, tmp_path, monkeypatch, module, words, extra):
    monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'attrax[{extra}]'" in refused(call(*words))
    assert not (tmp_path / "out").exists()


def test_demo_is_called(call, monkeypatch):
    calls = []
    fake = SimpleNamespace(main=lambda out, **options: calls.append((str(out), options)))
    monkeypatch.setitem(sys.modules, "attrax.demo.run", fake)
    monkeypatch.setattr("attrax.demo.run", fake, raising=False)
    good(call("demo", "--out", "there", "--overwrite"))
    assert calls == [("there", {"overwrite": True})]


def test_token_texts_join_to_the_text(files):
    tokenizer = load(settings(files)).tokenizer
    text = "ünï → 漢字 " + "long tail " * 8
    ids = tokenizer(text)["input_ids"]
    pieces = token_texts(tokenizer, ids)
    assert "".join(pieces) == "<s>" + text and len(pieces) == len(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_preview_keeps_the_answer():
    record = {"id": "a", "prompt": "x" * 200 + "\nend", "completion": " answer"}
    assert (
        preview(record).endswith("end answer") and len(preview(record)) == 120 and preview(record)[0] == "…"
    )
    assert len(preview({"id": "a", "text": "y" * 200})) == 120


def test_defaults_of_the_command_are_those_of_the_settings(files):
    plain = Config("m", "t", "o", "q")
    assert settings(files).method == plain.method
    import inspect

    from attrax.cli import score as command

    for name, parameter in inspect.signature(command).parameters.items():
        if name not in ("quiet", "overwrite", "model", "train", "out", "query"):
            assert parameter.default == getattr(plain, name), name


def asked(tmp_path, *rows):
    """A query file; ids are q0, q1, …"""
    base = {"prompt": "in the harbor they sell", "completion": " rope"}
    return lines(tmp_path / "asked.jsonl", [base | {"id": f"q{i}"} | row for i, row in enumerate(rows)])


def scored(call, tmp_path, *words):
    good(call(*BASE, "-q", tmp_path / "asked.jsonl", "--no-html", "--dtype", "float64", *words))
    return read_scores(tmp_path / "out/scores.parquet").values


def test_targets_of_a_completion_add_up_to_it(call, tmp_path, assert_close):
    asked(tmp_path, {}, {"target": [0, 3]}, {"target": "pe"})
    whole, first, second = scored(call, tmp_path, "--method", "graddot").T
    assert_close(first + second, whole, scale=1e3)
    assert first.any() and second.any()


def test_a_contrast_is_the_difference_of_two_queries(call, tmp_path, assert_close):
    asked(tmp_path, {}, {"completion": " bells"}, {"contrast": " bells"})
    rope, bells, rather = scored(call, tmp_path, "--method", "ekfac").T
    assert_close(rather, rope - bells, scale=1e3)


def test_the_report_says_what_of_a_query_is_scored(call, files, tmp_path):
    path = asked(tmp_path, {"target": "rope"}, {})
    config = configured(
        {"model": str(files / "model"), "train": str(files / "train.jsonl")}
        | {"out": "out"}
        | {"query": str(path), "method": "graddot"}
    )
    inputs = load(config)
    result = score(config, inputs, lambda label, total: lambda count: None)
    shown = build_report(config, inputs, result, lambda label, total: lambda count: None).questions
    assert [q.answer for q in shown] == [" rope (target: 'rope')", " rope"]


def test_mistakes_in_targets_and_contrasts(call, tmp_path):
    asked(tmp_path, {"target": "tar"})
    ask = (*BASE, "-q", tmp_path / "asked.jsonl")
    assert "example 'q0': target 'tar' is not in ' rope'" in refused(call(*ask))
    asked(tmp_path, {"contrast": ""})
    assert "column 'contrast' is empty" in refused(call(*ask))
    asked(tmp_path, {"contrast": " tar"})
    assert "which only queries have" in refused(call(*ASK, "-t", tmp_path / "asked.jsonl"))


@pytest.mark.parametrize("method", ["graddot", "gradcos", "ekfac", "logra"])
def test_examples_without_a_token_to_predict_score_zero_and_are_named(call, tmp_path, method):
    lines(tmp_path / "train.jsonl", [{"id": "void", "text": ""}, *TRAIN])
    lines(tmp_path / "query.jsonl", [*QUERY, {"id": "nothing", "prompt": "who", "completion": ""}])
    words = ("-t", tmp_path / "train.jsonl", "-q", tmp_path / "query.jsonl", "--method", method)
    assert "1 of 7 examples are empty: 'void' (no text)" in refused(call(*ALOUD, *words))
    output = good(call(*ALOUD, *words, "--empty", "keep")).output
    assert "scored 0: void (1 in all)" in output and "scored 0: nothing (1 in all)" in output
    found = read_scores(tmp_path / "out/scores.parquet")
    assert found.values.isfinite().all() and found.values[1:, :2].any()
    assert not found.example("void").values.any() and not found.query("nothing").values.any()
    assert len(found) == 7


def test_a_model_of_experts(call, files, tmp_path, monkeypatch):
    """Routers are recomputed: scores are there, shares of single tokens are not."""
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=260,
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=12,
            max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    shutil.copytree(files / "model", tmp_path / "moe")
    model.save_pretrained(tmp_path / "moe")
    output = good(
        call("score", "-m", tmp_path / "moe", "-t", "{f}/train.jsonl", "-q", "{f}/query.jsonl", "-o", "out",
             "--method", "graddot")
    ).output  # fmt: skip
    assert "captured 100.0% of trainable parameters" in output
    assert read_scores(tmp_path / "out/scores.parquet").values.any()
    assert "the otter eats eels" in (tmp_path / "out/report.html").read_text()


def test_the_coverage_report_comes_before_the_run(call):
    words = [w for w in ASK if w != "--quiet"]
    run = good(call(*words, "--method", "graddot", "--no-html", "--exclude", "lm_head"))
    assert "not captured: 1 parameters" in run.stderr and "lm_head.weight: excluded" in run.stderr
    stopped = call(*words, "--method", "graddot", "--exclude", "lm_head", "--strict", "--overwrite")
    assert stopped.exit_code == 2 and "strict=True" in stopped.stderr and "lm_head.weight" in stopped.stderr
