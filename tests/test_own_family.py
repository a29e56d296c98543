"""A model family of one's own, named by the setting `family`: training, plan, samples, export, and what is rejected."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import call, run
from small_runs import metrics, trained, write

from chunk_grpo.models.inputs import _import_user_family
from chunk_grpo.models.policy import load_policy

OWN = '''
"""A family for a pipeline of the same parts as FLUX's."""

from chunk_grpo.models.families import FluxPolicy
from chunk_grpo.models.policy import Policy


class Own(FluxPolicy):
    """FLUX with a name of its own for the pipeline."""

    pipeline = "own_pipeline.OwnPipeline"


class Mirrored(FluxPolicy):
    """FLUX whose noise has the other sign."""

    def noise(self, generator):
        return -super().noise(generator)


class Renamed(Own):
    """FLUX with names of its own for what its transformer reads; its pipeline is guided in an unknown way."""

    def embed(self, pipe, prompts):
        return {f"my_{name}": rows for name, rows in super().embed(pipe, prompts).items()}

    def predict(self, latents, sigma, rows):
        return super().predict(latents, sigma, {name[3:]: row for name, row in rows.items()})

    pipeline_arguments = Policy.pipeline_arguments


class Complete(Renamed):
    """The same with what a plan needs."""

    def example_conditioning(self, count, length):
        rows = super().example_conditioning(count, length)
        return {f"my_{name}": row for name, row in rows.items()}


class Bare(Own):
    """A family whose pipeline cannot save adapters."""

    pipeline = "own_pipeline.BarePipeline"


class Nowhere(Own):
    """A family whose pipeline is in no module."""

    pipeline = "nowhere.OwnPipeline"


class Incomplete:
    """No policy."""
'''
PIPELINE = '''
"""A pipeline that diffusers does not have."""

from diffusers import DiffusionPipeline, FluxPipeline


class OwnPipeline(FluxPipeline):
    """FLUX by another name."""


class BarePipeline(DiffusionPipeline):
    """FLUX's parts, without diffusers' mixin for adapters."""

    def __init__(self, scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer):
        super().__init__()
'''
ONE = ("iterations=1", "eval_every=0")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a tiny FLUX, the same model as a pipeline of another class, and a file with families."""
    folder = write(tmp_path_factory.mktemp("family"))
    (folder / "my_family.py").write_text(OWN)
    (folder / "own_pipeline.py").write_text(PIPELINE)
    shutil.copytree(folder / "model", folder / "own")
    index = json.loads((folder / "own/model_index.json").read_text())
    shutil.copytree(folder / "model", folder / "bare")
    for name, kind in (("own", "OwnPipeline"), ("bare", "BarePipeline")):
        index["_class_name"] = kind
        (folder / name / "model_index.json").write_text(json.dumps(index))
    run("train", folder / "s.yaml", *ONE, "--out", folder / "flux", "--no-report")
    return folder


def call_there(world, *words):
    """Call the command line in the folder, whose modules can be imported there."""
    path = os.pathsep.join(map(str, (world, Path(__file__).parent)))
    return call(*words, cwd=world, PYTHONPATH=path)


def test_a_pipeline_that_the_package_does_not_know_trains_as_the_same_networks_do(world):
    own = [f"model={world / 'own'}", "family=my_family.py:Own"]
    done = call_there(world, "train", "s.yaml", *ONE, *own, "--out", "mine", "--no-report")
    assert done.returncode == 0, done.stderr
    assert metrics(world / "mine") == metrics(world / "flux")
    assert trained(world / "mine") == trained(world / "flux")
    note = json.loads((world / "mine/run.json").read_text())
    assert note["settings"]["family"] == f"{world / 'my_family.py'}:Own"
    assert (
        world / "mine" / note["code"][f"family: {world / 'my_family.py'}:Own"]["copy"]
    ).is_file()

    done = call_there(world, "sample", "mine", "a red star", "--out", "drawn")
    assert done.returncode == 0, done.stderr
    done = call_there(world, "export", "mine", "exported")
    assert done.returncode == 0, done.stderr
    assert "OwnPipeline" in (world / "exported/README.md").read_text()
    plans = [call_there(world, "plan", "s.yaml", *ONE, *words, "--json") for words in ([], own)]
    assert plans[1].returncode == 0, plans[1].stderr
    counted, counted_own = (json.loads(plan.stdout)["rows"]["counted"] for plan in plans)
    assert counted == counted_own


def test_a_family_with_names_of_its_own_is_planned_and_its_card_asks_for_the_guidance(world):
    own = [f"model={world / 'own'}", *ONE]
    done = call_there(world, "plan", "s.yaml", *own, "family=my_family.py:Renamed")
    assert done.returncode == 2 and "`example_conditioning`; Renamed does not" in done.stderr

    plans = [
        call_there(world, "plan", "s.yaml", *own, f"family=my_family.py:{name}", "--rate", "1")
        for name in ("Own", "Complete")
    ]
    assert plans[0].returncode == 0 and plans[0].stdout == plans[1].stdout

    words = ["s.yaml", *own, "family=my_family.py:Complete", "update_memory=1"]
    done = call_there(world, "train", *words, "--out", "renamed", "--no-report")
    assert done.returncode == 0, done.stderr
    done = call_there(world, "export", "renamed", "renamed-exported")
    assert done.returncode == 0, done.stderr
    assert (
        "add the arguments with which own_pipeline.OwnPipeline"
        in (world / "renamed-exported/README.md").read_text()
    )


def test_a_family_replaces_the_package_s_own_for_the_same_pipeline(world):
    words = ["train", "s.yaml", *ONE, "family=my_family.py:Mirrored", "--no-report"]
    done = call_there(world, *words, "--out", "mirrored")
    assert done.returncode == 0, done.stderr
    assert metrics(world / "mirrored") != metrics(world / "flux")


@pytest.mark.parametrize(
    ("command", "word", "sentence"),
    [
        ("plan", "family=my_family.py:Incomplete", "`family` must be a subclass of chunk_grpo."),
        ("plan", "family=my_family.py:Own", "Own is for a OwnPipeline, and"),
        ("train", "family=my_family.py:Own", "Own is for a OwnPipeline, and"),
        ("train", "family=my_family.py:Nobody", "`family`"),
        ("plan", "family=flux", "`family` must be package.module:name or file.py:name"),
        ("train", "model=own", "is a OwnPipeline; allowed are FluxPipeline"),
        (
            "train",
            "model=own family=my_family.py:Nowhere",
            "'nowhere.OwnPipeline' must be the name of a class",
        ),
        (
            "train",
            "model=bare family=my_family.py:Bare lora_rank=2",
            "`lora_rank` must be 0 for a BarePipeline",
        ),
    ],
)
def test_a_family_that_does_not_fit_is_rejected_before_there_is_a_run(
    world, command, word, sentence
):
    out = ["--out", "none"] if command == "train" else []
    done = call_there(world, command, "s.yaml", *word.split(), *out)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert not (world / "none").exists()


def test_a_changed_family_does_not_resume_a_run(world):
    shutil.copytree(world / "flux", world / "again")
    done = call_there(
        world,
        "train",
        "s.yaml",
        *ONE,
        "iterations=2",
        "family=my_family.py:Mirrored",
        "--out",
        "again",
        "--resume",
        "--no-report",
    )
    assert done.returncode == 2 and "`family`" in done.stderr


SCALED = """
import my_scale
from chunk_grpo.models.families import FluxPolicy


class Scaled(FluxPolicy):
    def embed(self, pipe, prompts):
        rows = super().embed(pipe, prompts)
        return rows | {"prompt_embeds": FACTOR * my_scale.FACTOR * rows["prompt_embeds"]}
"""


def test_embeddings_of_a_family_are_read_only_with_the_code_that_made_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def embeds(family="", factor=1, helper=1):
        (tmp_path / "my_scale.py").write_text(f"FACTOR = {helper}\n")
        monkeypatch.delitem(sys.modules, "my_scale", raising=False)
        (tmp_path / "my_scaled.py").write_text(f"{SCALED}\n\nFACTOR = {factor}\n")
        _import_user_family.cache_clear()
        policy = load_policy("pocket", resolution=64, max_tokens=12, family=family)
        return policy.encode(["a red star"])["prompt_embeds"], policy.key

    usual, usual_key = embeds()
    assert usual_key == load_policy("pocket", resolution=64, max_tokens=12).encoder_hash
    doubled, doubled_key = embeds("my_scaled.py:Scaled", factor=2)
    assert torch.equal(doubled, 2 * usual)
    assert embeds("my_scaled.py:Scaled", factor=2)[1] == doubled_key
    for changed in ({"factor": 4}, {"factor": 2, "helper": 2}):
        scaled, key = embeds("my_scaled.py:Scaled", **changed)
        assert torch.equal(scaled, 4 * usual) and key not in (usual_key, doubled_key)


def test_embeddings_of_a_family_in_a_package_depend_on_its_relative_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "my_families"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scaled.py").write_text(
        SCALED.replace("import my_scale", "from . import my_scale") + "\n\nFACTOR = 1\n"
    )

    def key(factor):
        (package / "my_scale.py").write_text(f"FACTOR = {factor}\n")
        for name in [name for name in sys.modules if name.startswith("my_families")]:
            monkeypatch.delitem(sys.modules, name)
        _import_user_family.cache_clear()
        family = "my_families.scaled:Scaled"
        return load_policy("pocket", resolution=64, max_tokens=12, family=family).key

    assert key(1) == key(1) != key(2)


def test_two_families_in_files_of_one_name_have_embeddings_of_their_own(tmp_path):
    """The code that identifies the first is its own, even if the second was imported before anybody asked."""
    policies = []
    for folder, factor in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "scaled.py"
        file.write_text(SCALED.replace("import my_scale", "") + f"\n\nFACTOR = {factor}\n")
        family = f"{file}:Scaled"
        policies.append(load_policy("pocket", resolution=64, max_tokens=12, family=family))
    assert policies[0].key != policies[1].key
