"""What lies beside exported weights, and what a folder's small files say about how responses end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.types import InputError
from megatron_dapo.weights.hf_export import copy_companions
from megatron_dapo.weights.hf_folder import ending_ids, load_config, why_no_weights

SOURCE = {
    "config.json": '{"model_type": "qwen2", "torch_dtype": "float32", "_name_or_path": "Qwen/Qwen2.5-0.5B"}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "chat_template.jinja": "main",
    "additional_chat_templates/tool_use.jinja": "tools",
    "additional_chat_templates/rag.jinja": "documents",
    "LICENSE": "text",
    "README.md": "---\nlicense: apache-2.0\nlicense_link: https://there\npipeline_tag: x\n---\n\n# license: not this\n",
    "model.safetensors": "weights",
    "model.safetensors.index.json": "{}",
    "optimizer.pt": "other",
    "notes.txt": "mine",
}


def source(folder: Path, **changed: str | None) -> Path:
    for name, text in {**SOURCE, **changed}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_an_export_has_all_that_renders_prompts_and_ends_responses_and_no_weights(tmp_path):
    (tmp_path / "out").mkdir()
    copy_companions(str(source(tmp_path / "hf")), tmp_path / "out", "bfloat16", "Recipe: a.toml, after rollout step 7.")
    found = {str(p.relative_to(tmp_path / "out")): p.read_text() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    same = set(SOURCE) - {
        "config.json", "README.md", "model.safetensors", "model.safetensors.index.json", "optimizer.pt", "notes.txt",
    }  # fmt: skip
    assert found.keys() == same | {"config.json", "README.md"}
    assert all(found[name] == SOURCE[name] for name in same)
    assert json.loads(found["config.json"]) == {**json.loads(SOURCE["config.json"]), "torch_dtype": "bfloat16"}
    _, head, body = found["README.md"].split("---\n")
    assert "license: apache-2.0\nlicense_link: https://there\n" in head and "pipeline" not in head
    assert "base_model: Qwen/Qwen2.5-0.5B\n" in head
    assert "trained with DAPO" in body and "Recipe: a.toml, after rollout step 7." in body and "# license" not in body


@pytest.mark.parametrize("card", [None, "no head", "---\nlicense: mit\nnever closed", ""])
def test_no_licence_is_made_up(tmp_path, card):
    (tmp_path / "out").mkdir()
    changed = {"README.md": card, "config.json": '{"model_type": "llama", "_name_or_path": "/data/x/models"}'}
    copy_companions(str(source(tmp_path / "hf", **changed)), tmp_path / "out", "float32")
    text = (tmp_path / "out/README.md").read_text()
    assert "license" not in text and "base_model" not in text and "/data" not in text and "\nhf, trained" in text


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 3}, None, {3}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4, 5}),
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, {5, 6}),
        ({}, {}, set()),
        (None, {"eos_token_id": 0}, {0}),
        (None, None, set()),
    ],
)
def test_ids_that_end_a_text(tmp_path, config, generation, ids):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert ending_ids(str(tmp_path)) == ids


@pytest.mark.parametrize("content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}', "[1]", "{", "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_eos_that_is_no_id_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(InputError, match=name) as caught:
        ending_ids(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "3", "{", "\udcff\udcfe{}", "\ufeff{}", "[" * 100_000],
    ids=lambda content: content[:9],
)
def test_a_config_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match="config.json") as caught:
        load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="an adapter lies there; merge it"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["tokenizer.json"], "no safetensors there"),
        (["pytorch_model.bin"], "its weights are in pytorch_model.bin, which is not read; save them as safetensors"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pytorch_model-00001-of-00002.bin"),
        (["x.gguf"], "x.gguf"),
        (["model.safetensors.index.json"], "the shards that model.safetensors.index.json names are not there"),
    ],
)
def test_what_lies_in_place_of_weights_is_named(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_text("")
    assert words in why_no_weights(str(tmp_path))
