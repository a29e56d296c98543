"""`chunk-grpo export --push-to-hub`: what reaches the hub, and what is rejected before anything is written."""

import subprocess

import pytest
import stub_hub
import tiny_families
from commands import command, environment
from huggingface_hub import constants
from small_runs import write
from typer.testing import CliRunner

from chunk_grpo import InputError
from chunk_grpo.cli.publishing import publishing_app
from chunk_grpo.core import settings
from chunk_grpo.models import trainable
from chunk_grpo.runs import run_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of a tiny FLUX with an adapter, without its training."""
    folder = tmp_path_factory.mktemp("upload")
    write(folder)
    changes = {
        "model": str(tiny_families.build("dev", folder / "tiny")),
        "resolution": 64,
        "eval_resolution": 64,
        "max_tokens": 16,
        "lora_rank": 2,
        "reward": "incompressibility",
        "eval_rewards": [],
    }
    made = run_folder.create_run(settings.load_settings("pocket/tiny", changes), folder / "run")
    model = trainable.load_trainable_policy(
        changes["model"], resolution=64, max_tokens=16, lora_rank=2
    )
    trainable.save_trained_weights(model, made / "final")
    run_folder.update_run_json(made, status="finished")
    return made


@pytest.fixture
def hub():
    """A hub on this machine."""
    with stub_hub.running() as hub:
        yield hub


@pytest.fixture
def export(run, hub, monkeypatch):
    """Returns a function that calls the command in this process, with a login at the hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def call(*words, token=stub_hub.TOKEN):
        monkeypatch.setenv("HF_TOKEN", token)
        return CliRunner().invoke(publishing_app, ["export", str(run), *map(str, words)])

    return call


@pytest.mark.slow
def test_the_command_uploads_what_it_exports(run, hub, tmp_path):
    done = subprocess.run(
        command("export", run, tmp_path / "out", "--push-to-hub", "me/my-lora"),
        env=environment(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_TOKEN=stub_hub.TOKEN),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"uploaded: {hub.url}/me/my-lora" in done.stdout
    assert "pytorch_lora_weights.safetensors" in hub.files["me/my-lora"]


@pytest.mark.parametrize("public", [False, True])
def test_the_hub_gets_the_files_of_the_export(export, hub, tmp_path, public):
    options = ["--public"] if public else []
    done = export(tmp_path / "out", "--push-to-hub", "me/my-lora", *options)
    assert done.exit_code == 0, done.output
    assert f"uploaded: {hub.url}/me/my-lora" in done.output
    assert hub.private == {"me/my-lora": not public}
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    uploaded = hub.files["me/my-lora"]
    assert {name: uploaded[name] for name in written} == written
    assert "pytorch_lora_weights.safetensors" in written and "README.md" in written


@pytest.mark.parametrize(
    ("words", "token", "sentence"),
    [
        (["--push-to-hub", "a/b/c"], stub_hub.TOKEN, "must be a repository of the hub"),
        (["--push-to-hub", "me/x"], "hf_wrong", "can be reached with your login"),
        (["--public"], stub_hub.TOKEN, "`--public` needs the repository"),
    ],
)
def test_what_cannot_be_uploaded_is_not_exported_either(
    export, hub, tmp_path, words, token, sentence
):
    done = export(tmp_path / "out", *words, token=token)
    assert isinstance(done.exception, InputError) and sentence in str(done.exception)
    assert not (tmp_path / "out").exists() and not hub.files


def test_a_rejected_upload_keeps_the_export(export, hub, tmp_path):
    hub.read_only = True
    done = export(tmp_path / "out", "--push-to-hub", "me/my-lora")
    assert isinstance(done.exception, InputError)
    assert f"the export is complete in {tmp_path / 'out'}" in str(done.exception)
    assert (tmp_path / "out/README.md").is_file()
