"""Reading examples, tokens and labels of every form, batches, and every error a user can run into."""

import json
import sys
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from attrax.frontends.data.examples import batches, encode, loss_tokens, read_examples
from attrax.frontends.data.tokens import IGNORE, parts_of, tokenize

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] + '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so it is"},
]


def make_tokenizer(ends="<s> $A </s>", template=TEMPLATE, merges=()) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*SPECIAL, *alphabet, *("".join(m) for m in merges)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    bpe.decoder = decoders.ByteLevel()
    if ends:
        bpe.post_processor = processors.TemplateProcessing(
            single=ends, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer(tokenizer, tokens, labels):
    """What carries the loss, as text."""
    return tokenizer.decode([int(t) for t, label in zip(tokens, labels, strict=True) if label != IGNORE])


ROWS = [
    {"id": "a", "text": "NA", "year": 7},
    {"id": "007", "text": 'two\nlines, "quoted"', "year": 8},
    {"id": "c", "text": "üñí", "year": 9},
]


def write_jsonl(folder):
    return lines(folder / "x.jsonl", ROWS)


def write_json(folder):
    (folder / "x.json").write_text(json.dumps(ROWS))
    return folder / "x.json"


def write_csv(folder):
    pd.DataFrame(ROWS).to_csv(folder / "x.csv", index=False)
    return folder / "x.csv"


def write_tsv(folder):
    pd.DataFrame(ROWS).to_csv(folder / "x.tsv", index=False, sep="\t")
    return folder / "x.tsv"


def write_parquet(folder):
    pd.DataFrame(ROWS).to_parquet(folder / "x.parquet")
    return folder / "x.parquet"


def write_saved(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [write_jsonl, write_json, write_csv, write_tsv, write_parquet, write_saved])
def test_every_format_gives_the_same_examples(tmp_path, write):
    found = read_examples(write(tmp_path))
    assert [(r["id"], r["text"], int(r["year"])) for r in found] == [
        (r["id"], r["text"], r["year"]) for r in ROWS
    ]


def test_splits_of_a_saved_dataset(tmp_path):
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(tmp_path / "both")
    assert len(read_examples(tmp_path / "both", split="test")) == 1
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]"):
        read_examples(tmp_path / "both")
    datasets.DatasetDict({"train": both["train"]}).save_to_disk(tmp_path / "one")
    assert len(read_examples(tmp_path / "one")) == 3
    with pytest.raises(ValueError, match="without splits"):
        read_examples(write_saved(tmp_path), split="train")
    with pytest.raises(ValueError, match="this is a file"):
        read_examples(write_jsonl(tmp_path), split="train")


def test_content_ids_are_stable_and_tell_duplicates_apart(tmp_path):
    first = read_examples(lines(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "y"}, {"text": "x"}]))
    second = read_examples(lines(tmp_path / "b.jsonl", [{"text": "y", "note": 1}, {"text": "x"}]))
    ids = [r["id"] for r in first]
    assert len(set(ids)) == 3 and ids[2] == ids[0] + "-2"
    assert [r["id"] for r in second] == [ids[1], ids[0]]


def test_integer_ids_become_strings(tmp_path):
    found = read_examples(lines(tmp_path / "a.jsonl", [{"id": 3, "text": "x"}, {"id": 4, "text": "y"}]))
    assert [r["id"] for r in found] == ["3", "4"]


def test_byte_order_mark_blank_lines_and_long_cells(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "x"}\n\n{"text": "y"}\n', encoding="utf-8")
    assert [r["text"] for r in read_examples(tmp_path / "a.jsonl")] == ["x", "y"]
    (tmp_path / "a.csv").write_text("\ufefftext\n" + "z" * 200_000 + "\n", encoding="utf-8")
    assert len(read_examples(tmp_path / "a.csv")[0]["text"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "", "no examples"),
        ("a.csv", "text\n", "no examples"),
        ("a.jsonl", '{"body": "x"}\n', r"row 1 has the columns \['body'\]; expected 'text'"),
        ("a.jsonl", '{"text": "x"}\n{"prompt": "x"}\n', "row 2 has the columns"),
        ("a.jsonl", '{"text": null}\n', "row 1"),
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is list"),
        ("a.json", "[1]", "element 1 is int"),
        ("a.csv", 'text,year\n"x",1\ny\n', "line 3 has 1 cells, the header has 2"),
        ("a.csv", 'text\n"x\n', "not a valid table"),
        ("a.csv", "text,text\nx,y\n", "repeats a column"),
        (
            "a.jsonl",
            '{"id": "p", "text": "x"}\n{"id": "p", "text": "y"}\n',
            r"1 ids occur more than once.*\['p'\]",
        ),
        ("a.jsonl", '{"id": "p", "text": "x"}\n{"text": "y"}\n', "row 2 has the id None"),
        ("a.jsonl", '{"id": 1.5, "text": "x"}\n', "row 1 has the id 1.5"),
        ("a.parquet", "nonsense", "not a parquet file"),
        ("a.txt", "x", r"unknown format '.txt'; expected one of \['.jsonl'"),
    ],
)
def test_unusable_files_say_what_is_wrong(tmp_path, name, content, said):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as error:
        read_examples(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_other_unusable_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_examples(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="save_to_disk"):
        read_examples(tmp_path)
    (tmp_path / "latin.csv").write_bytes("text\nfünf\n".encode("latin-1"))
    with pytest.raises(ValueError, match="byte 6 is not UTF-8"):
        read_examples(tmp_path / "latin.csv")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'attrax\[report\]'"):
        read_examples(path)


def test_text_is_tokenized_as_the_tokenizer_does(tokenizer):
    tokens, labels = tokenize({"id": "a", "text": "so"}, tokenizer)
    assert tokens.tolist() == labels.tolist() == tokenizer("so")["input_ids"]
    assert tokens[0] == 1 and tokens[-1] == 2


@pytest.mark.parametrize("ends", ["<s> $A </s>", "<s> $A", ""])
def test_completion_has_the_loss_and_no_end_of_text(ends):
    tokenizer = make_tokenizer(ends)
    tokens, labels = tokenize({"id": "a", "prompt": "two and", "completion": " two"}, tokenizer)
    assert answer(tokenizer, tokens, labels) == " two"
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=True) == "two and two"
    assert tokens.tolist().count(1) == ("<s>" in ends) and 2 not in tokens.tolist()


def test_a_spelled_out_end_of_text_is_kept(tokenizer):
    tokens, labels = tokenize({"id": "a", "prompt": "one", "completion": " two</s>"}, tokenizer)
    assert tokens[-1] == 2 and labels[-1] == 2


def test_a_token_across_the_border_belongs_to_the_completion():
    tokenizer = make_tokenizer("<s> $A", merges=[("a", "b")])
    tokens, labels = tokenize({"id": "a", "prompt": "xa", "completion": "by"}, tokenizer)
    assert answer(tokenizer, tokens, labels) == "aby"


def test_empty_prompt_and_empty_completion(tokenizer):
    tokens, labels = tokenize({"id": "a", "prompt": "", "completion": "hey"}, tokenizer)
    assert loss_tokens(labels) == 3 and tokens[0] == 1
    _, labels = tokenize({"id": "a", "prompt": "hey", "completion": ""}, tokenizer)
    assert loss_tokens(labels) == 0


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_chat_ids_are_the_template_s(template):
    tokenizer = make_tokenizer(template=template)
    tokens, labels = tokenize({"id": "a", "messages": CHAT}, tokenizer)
    assert (
        tokens.tolist() == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    )
    assert tokens.tolist().count(1) == 4  # the template's own, and no other
    expected = "yes</s>so it is</s>" if template == MARKED else "so it is</s>"
    assert answer(tokenizer, tokens, labels) == expected


def test_chat_whose_last_message_is_the_user_s(tokenizer):
    tokens, labels = tokenize({"id": "a", "messages": [*CHAT, {"role": "user", "content": "ok"}]}, tokenizer)
    assert answer(tokenizer, tokens, labels) == "so it is</s>"
    tokens, labels = tokenize({"id": "a", "messages": CHAT[:1]}, tokenizer)
    assert loss_tokens(labels) == 0


def test_chat_that_opens_with_the_assistant(tokenizer):
    tokens, labels = tokenize({"id": "a", "messages": CHAT[1:2]}, tokenizer)
    assert answer(tokenizer, tokens, labels) == "<s>assistant: yes</s>"


def test_chat_as_a_json_string_and_with_null_fields(tokenizer):
    plain = tokenize({"id": "a", "messages": CHAT}, tokenizer)
    quoted = tokenize({"id": "a", "messages": json.dumps(CHAT)}, tokenizer)
    padded = tokenize({"id": "a", "messages": [{**m, "name": None} for m in CHAT]}, tokenizer)
    assert plain[1].tolist() == quoted[1].tolist() == padded[1].tolist()


def test_generation_prompt_that_merges_into_the_answer():
    tokenizer = make_tokenizer(merges=[("Ġ", "y")])
    tokens, labels = tokenize({"id": "a", "messages": CHAT[:2]}, tokenizer)
    assert answer(tokenizer, tokens, labels) == " yes</s>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "renders the messages before",
        ),
        ("{{ raise_exception('roles must alternate') }}", "chat template failed: .*roles must alternate"),
        (None, "chat_template"),
    ],
)
def test_chat_templates_that_do_not_serve(template, said):
    with pytest.raises(ValueError, match=said):
        tokenize({"id": "a", "messages": CHAT}, make_tokenizer(template=template))


@pytest.mark.parametrize(
    "record",
    [
        {"id": "bad", "text": 7},
        {"id": "bad", "prompt": "x", "completion": ["y"]},
        {"id": "bad", "messages": []},
        {"id": "bad", "messages": "not json"},
        {"id": "bad", "messages": [{"role": "user"}]},
        {"id": "bad", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"id": "bad", "messages": 3},
    ],
)
def test_wrong_types_name_the_example(tokenizer, record):
    with pytest.raises(ValueError, match="'bad'.*expected"):
        encode([record], tokenizer, max_length=64)


def test_a_choice_of_forms_is_never_guessed(tokenizer):
    record = {"id": "a", "text": "whole", "prompt": "who", "completion": "le"}
    with pytest.raises(ValueError, match=r"can be read as \['text', 'completion'\]. Say which: form="):
        encode([record], tokenizer, max_length=64)
    assert loss_tokens(encode([record], tokenizer, max_length=64, form="completion").labels[0]) == 2
    with pytest.raises(ValueError, match=r"needs the columns \['messages'\]"):
        encode([record], tokenizer, max_length=64, form="chat")


def test_parts_of_every_form():
    assert parts_of({"id": "a", "text": "x"}) == ("", "x")
    assert parts_of({"id": "a", "messages": CHAT}) == (
        "user: hi\nassistant: yes\nuser: why\nassistant: ",
        "so it is",
    )
    assert parts_of({"id": "a", "messages": CHAT[:1]}) == ("user: hi\n", "")


RECORDS = [{"id": f"r{i}", "text": "x" * i} for i in (3, 9, 1, 5)]


def test_overlong_examples(tokenizer):
    with pytest.raises(ValueError, match=r"1 of 4 examples are overlong: 'r9' \(11 tokens, 8 allowed\)"):
        encode(RECORDS, tokenizer, max_length=8)
    cut = encode(RECORDS, tokenizer, max_length=8, overlong="truncate")
    assert cut.truncated == ("r9",) and len(cut.tokens[1]) == 8 and "1 truncated" in repr(cut)
    left = encode(RECORDS, tokenizer, max_length=8, overlong="skip")
    assert left.ids == ("r3", "r1", "r5") and [s.id for s in left.skipped] == ["r9"]
    assert "1 skipped (overlong)" in repr(left)
    with pytest.raises(ValueError, match="none of 4 examples is left"):
        encode(RECORDS, tokenizer, max_length=2, overlong="skip")
    wrong: Any = "drop"
    with pytest.raises((ValueError, TypeError), match="overlong"):
        encode(RECORDS, tokenizer, max_length=2, overlong=wrong)


def test_empty_examples():
    bare = make_tokenizer("")
    records = [{"id": "void", "text": ""}, {"id": "one", "text": "x"}, {"id": "two", "text": "xy"}]
    with pytest.raises(ValueError, match=r"2 of 3 examples are empty: 'void' \(no text\), 'one'"):
        encode(records, bare, max_length=8)
    left = encode(records, bare, max_length=8, empty="skip")
    assert left.ids == ("two",) and [s.id for s in left.skipped] == ["void", "one"]
    assert encode(records[1:], bare, max_length=8, empty="keep").ids == ("one", "two")
    with pytest.raises(ValueError, match="1 of 3 examples are empty: 'void'"):
        encode(records, bare, max_length=8, empty="keep")


def test_a_prompt_that_fills_the_length_is_empty(tokenizer):
    records = [{"id": "a", "prompt": "xxxxxxx", "completion": "y"}, {"id": "b", "text": "z"}]
    left = encode(records, tokenizer, max_length=6, overlong="truncate", empty="skip")
    assert left.ids == ("b",) and left.skipped[0].reason == "what comes before the loss fills all 6 tokens"


def test_batches_lose_nothing_and_keep_the_budget(tokenizer):
    records = [{"id": str(i), "text": "x" * (1 + 7 * i % 23)} for i in range(40)]
    encoded = encode(records, tokenizer, max_length=64)
    made = batches(encoded, tokens=60)
    seen = {}
    for batch in made:
        rows, width = batch["input_ids"].shape
        assert rows * width <= 60
        for name, ids, mask, labels in zip(
            batch["example_ids"], batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
        ):
            n = int(mask.sum())
            assert mask[:n].all() and not ids[n:].any() and (labels[n:] == IGNORE).all()
            seen[name] = (ids[:n].tolist(), labels[:n].tolist())
    expected = {
        n: (t.tolist(), y.tolist())
        for n, t, y in zip(encoded.ids, encoded.tokens, encoded.labels, strict=True)
    }
    assert seen == expected and sum(len(b["example_ids"]) for b in made) == 40
    again = [batch["example_ids"] for batch in made]
    assert again == [batch["example_ids"] for batch in made] and len(made) == len(again)


def test_an_example_beyond_the_budget_is_a_batch_of_its_own(tokenizer):
    encoded = encode([{"id": "a", "text": "x" * 30}, {"id": "b", "text": "y"}], tokenizer, max_length=64)
    assert [b["example_ids"] for b in batches(encoded, tokens=8)] == [("a",), ("b",)]
    with pytest.raises(ValueError, match="positive"):
        batches(encoded, tokens=0)


def test_only_some_examples(tokenizer):
    encoded = encode(RECORDS, tokenizer, max_length=64)
    some = encoded.only(["r5", "r3"])
    assert some.ids == ("r5", "r3") and torch.equal(some.tokens[1], encoded.tokens[0])
    with pytest.raises(KeyError, match=r"\['nope'\]"):
        encoded.only(["nope"])


def test_digest_tells_tokenizations_apart(tokenizer):
    plain = encode(RECORDS, tokenizer, max_length=64)
    assert plain.digest() == encode(RECORDS, tokenizer, max_length=64).digest()
    assert plain.digest() != encode(RECORDS, make_tokenizer("<s> $A"), max_length=64).digest()
    assert plain.digest() != encode(RECORDS, tokenizer, max_length=8, overlong="truncate").digest()
