"""Images of a run's own prompts, and a run that plain diffusers loads: the same images, and nothing is spoilt."""

import json
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from commands import call
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from chunk_grpo import InputError, export_run, sample_run, sample_widget
from chunk_grpo.cli import main
from chunk_grpo.core import settings
from chunk_grpo.core.files import hash_files, read_json, write_json
from chunk_grpo.evaluation import run_images
from chunk_grpo.evaluation.evaluate import evaluate
from chunk_grpo.models import trainable
from chunk_grpo.models.inputs import check_and_hash_inputs, fetch_model, fingerprint_inputs
from chunk_grpo.reporting import samples
from chunk_grpo.reporting.model_card import card_data
from chunk_grpo.runs import run_folder
from chunk_grpo.training import checkpoints

PROMPTS = ["a photo of a red star", "a drawing of two circles", "a green square"]


def perturbed(settings):
    """A policy whose trained weights are not the base's."""
    policy = trainable.load_trainable_policy(
        settings.model,
        resolution=64,
        max_tokens=12,
        lora_rank=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
    )
    with torch.no_grad():
        for i, p in enumerate(policy.trained):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.add_(0.2 * noise if settings.lora_rank else 0.1 * p.std(correction=0) * noise)
    return policy


def make(folder, **changes):
    """A finished run without its training."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    run_settings = settings.load_settings(
        "pocket/tiny", {"eval_prompts": str(folder / "prompts.txt"), "threads": 1} | changes
    )
    run = run_folder.create_run(run_settings, folder / "run")
    trainable.save_trained_weights(perturbed(run_settings), run / "final")
    run_folder.update_run_json(run, status="finished")
    return run


@pytest.fixture(
    scope="module",
    params=[{"lora_rank": 4, "lora_alpha": 8}, {"lora_rank": 0}],
    ids=["lora", "full"],
)
def run(request, tmp_path_factory):
    """A run of either kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make(tmp_path_factory.mktemp("made"), **request.param)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A run with an adapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make(tmp_path_factory.mktemp("made"), lora_rank=4)


def pixels(image):
    """Grey levels as numbers that can be subtracted."""
    return np.asarray(Image.open(image) if not isinstance(image, Image.Image) else image).astype(
        int
    )


def test_images_outlive_a_contact_sheet_that_cannot_be_drawn(lora, tmp_path, monkeypatch):
    def fail(**arguments):
        raise MemoryError("too many images")

    monkeypatch.setattr(samples, "plot_image_grid", fail)
    lines = []
    made = sample_run(lora, ["a red star"], seeds=[3], out=tmp_path / "drawn", log=lines.append)
    assert all((tmp_path / "drawn" / one["file"]).is_file() for one in made)
    assert (tmp_path / "drawn/samples.json").is_file()
    assert "warning: no contact sheet was drawn: MemoryError: too many images" in lines


def test_a_card_says_what_its_weights_score(lora, tmp_path):
    assert "not evaluated" in (export_run(lora, tmp_path / "before") / "README.md").read_text()
    evaluate(lora, processes=1)
    card = (export_run(lora, tmp_path / "after") / "README.md").read_text()
    row = run_folder.read_evaluation_summary(lora)["rewards"]["pocket-clip"]
    assert f"| pocket-clip | base | {row['base']['mean']:.3f} ({row['base']['lo']:.3f} to" in card
    assert "learning_rate" in card and "Licence" in card and str(tmp_path) not in card
    assert card.startswith("---\n") and "library_name: diffusers" in card


def test_samples_are_the_images_of_the_evaluation(lora):
    """Every arm, whichever other prompts are asked for, to the one grey level that a batch may move."""
    if run_folder.read_evaluation_summary(lora) is None:  # where this test runs alone
        evaluate(lora, processes=1)
    arms = ["base", "plain", "hybrid", "base-as-trained", "as-trained"]
    drawn = {
        (x["arm"], x["prompt"]): x["image"]
        for x in sample_run(lora, [PROMPTS[2], "a star", PROMPTS[0]], arms)
    }
    records = [r for r in run_folder.read_evaluation_records(lora) if r["prompt"] != PROMPTS[1]]
    assert len(records) == 10
    for r in records:
        theirs = pixels(lora / "evaluation" / r["file"])
        assert abs(pixels(drawn[r["arm"], r["prompt"]]) - theirs).max() <= 1, (
            r["arm"],
            r["prompt"],
        )
    assert (pixels(drawn["base", PROMPTS[0]]) != pixels(drawn["plain", PROMPTS[0]])).any()


def test_the_card_draws_in_plain_diffusers_what_sample_draws(run, tmp_path, monkeypatch):
    """The lines of the card, executed as they stand, beside the exported folder: plain and hybrid."""
    monkeypatch.chdir(tmp_path)
    export_run(run, "mine")
    card = (tmp_path / "mine/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert "chunk_grpo.cli" not in code and "sample_run" not in code
    names = {}
    exec(code, names)
    ours = {x["arm"]: pixels(x["image"]) for x in sample_run(run, [PROMPTS[0]])}
    assert (ours["plain"] != ours["hybrid"]).any() and (ours["base"] != ours["hybrid"]).any()
    for arm in ("plain", "hybrid"):
        apart = abs(ours[arm] - pixels(names[arm]))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-3, (
            arm
        )  # a level that lies on the edge may round either way


def test_a_run_that_goes_on_is_sampled_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path)
    (finished,) = sample_run(run, PROMPTS[:1], ["plain"])
    note = read_json(run / "run.json")
    policy = perturbed(settings.load_settings("pocket/tiny"))
    weights = {"weights": {str(i): p for i, p in enumerate(policy.trained)}}
    about = {"run_id": note["run_id"], "settings": note["settings"]}
    rest = {"seconds": 1.0, "seconds_cpu": 1.0, "ema_step": 0}
    checkpoints.write_checkpoint(run, 2, weights, rest, identity=about)
    (run / "final").rename(run / "other")
    (running,) = sample_run(run, PROMPTS[:1], ["plain"], out=tmp_path / "out")
    assert (pixels(running["image"]) == pixels(finished["image"])).all()
    assert "iteration 2" in read_json(tmp_path / "out/samples.json")["weights"]
    assert (
        "after 2 of 3 iterations" in (export_run(run, tmp_path / "mine") / "README.md").read_text()
    )
    # A finished run is exported and sampled from its final weights, unless a checkpoint is named.
    (run / "other").rename(run / "final")
    for words, done in (([], 3), (["--checkpoint", "2"], 2)):
        folder = tmp_path / f"exported-{done}"
        answer = CliRunner().invoke(main.app, ["export", str(run), str(folder), *words])
        assert answer.exit_code == 0, answer.output
        assert f"after {done} of 3 iterations" in (folder / "README.md").read_text()
    words = ["sample", str(run), PROMPTS[0], "--arm", "plain", "--checkpoint", "2"]
    answer = CliRunner().invoke(main.app, [*words, "--out", str(tmp_path / "drawn")])
    assert answer.exit_code == 0, answer.output
    assert "iteration 2" in read_json(tmp_path / "drawn/samples.json")["weights"]

    (run / "checkpoints/000002/weights.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="damaged"):
        sample_run(run, PROMPTS[:1], checkpoint=2)


def test_an_interrupted_continuation_counts_by_its_checkpoint(tmp_path, monkeypatch):
    """A finished run that is resumed keeps the final/ of its earlier end, which nobody may take for the new one."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path)
    note = read_json(run / "run.json")
    for status in ("created", "running", "interrupted", "failed"):
        run_folder.update_run_json(run, status=status)
        with pytest.raises(InputError, match="neither final weights nor a checkpoint"):
            run_images.find_verified_weights(run)
        for function in (run_images.find_final_weights, run_images.hash_trained_weights):
            with pytest.raises(InputError, match="was resumed and is not finished"):
                function(run)
    about = {"run_id": note["run_id"], "settings": note["settings"]}
    weights = {"weights": {"0": torch.zeros(2)}}
    rest = {"seconds": 1.0, "seconds_cpu": 1.0, "ema_step": 0}
    checkpoints.write_checkpoint(run, 2, weights, rest, identity=about)
    assert run_images.find_verified_weights(run).name == "000002"
    run_folder.update_run_json(run, status="finished")
    assert run_images.find_verified_weights(run).name == "final"
    assert run_images.find_verified_weights(run, 2).name == "000002"
    with pytest.raises(InputError, match="`checkpoint` must be .*, one of 2; got 1"):
        run_images.find_verified_weights(run, 1)

    # A run that recorded the iteration of its final weights keeps them until there is a newer checkpoint.
    for final_iteration, name in ((1, "000002"), (2, "final")):
        run_folder.update_run_json(run, status="failed", final_iteration=final_iteration)
        assert run_images.find_verified_weights(run).name == name
    (run / "run.json").unlink()
    assert run_images.find_final_weights(run).name == "final"


def test_the_command_writes_images_and_a_sheet(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text(
        "a red star\n" + r"$x_1$ and $\frac$" + "\n" + "x" * 300 + "\n"
    )
    words = [
        "sample",
        lora,
        "--prompts",
        "list.txt",
        "--arm",
        "base,trained,hybrid",
        "--seed",
        "0,1",
        "--out",
        "drawn",
    ]
    answer = CliRunner().invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert answer.exit_code == 0 and "18 of 18 images" in answer.output
    assert "drawn/contact-sheet.png" in answer.output
    about = read_json(tmp_path / "drawn/samples.json")
    columns = {(arm, seed) for arm in ("base", "plain", "hybrid") for seed in (0, 1)}
    assert {(x["arm"], x["seed"]) for x in about["images"]} == columns
    assert all(Image.open(tmp_path / "drawn" / x["file"]).size == (64, 64) for x in about["images"])
    with Image.open(tmp_path / "drawn/contact-sheet.png") as sheet:
        assert sheet.width > 6 * 64 and sheet.height > 3 * 64
    answer = CliRunner().invoke(
        main.app, ["sample", str(lora), "a red star", "--arm", "plain"], catch_exceptions=False
    )
    assert "samples/run-001" in answer.output
    again = pixels(tmp_path / "samples/run-001/00000-plain-1000.png")
    (asked,) = sample_run(lora, ["a red star"], ["trained"], [1000])
    assert (again == pixels(asked["image"])).all()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["a star", "--arm", "bass"], "'bass'"),
        (
            ["a star", "--arm", "base", "--split", "2"],
            "`--split` has an effect only with the arm hybrid",
        ),
        (["a star", "--arm", "hybrid", "--split", "5"], "`hybrid_split`"),
        (["a star", "--seed", "1.5"], "`--seed`"),
        (["a star", "--steps", "0"], "`eval_steps`"),
        ([], "neither"),
        (["a star", "--seed", "2,2"], "must all be different"),
        (["a star", "--prompts", "list.txt"], "both"),
        ([" "], "none empty"),
        (["a star", "--resolution", "7"], "7"),
        (["--prompts", "none.txt"], "none.txt"),
        (["a star", "--out", "full"], "not empty"),
        (["a star", "--out", "thesis.tex"], "is a file"),
    ],
)
def test_what_is_wrong_is_said_before_weights_are_loaded(lora, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name in ("full/letter.txt", "thesis.tex", "list.txt"):
        (tmp_path / name).write_text("dear\n")
    before = sorted(tmp_path.rglob("*"))
    loading = (
        trainable.load_trainable_policy if "--resolution" in words else None
    )  # a model knows its own stride
    monkeypatch.setattr(
        trainable, "load_trainable_policy", loading or (lambda *_, **__: pytest.fail("weights"))
    )
    answer = CliRunner().invoke(main.app, ["sample", str(lora), *words])
    assert isinstance(answer.exception, InputError) and part in str(answer.exception), (
        answer.exception
    )
    assert (
        sorted(tmp_path.rglob("*")) == before
        and (tmp_path / "full/letter.txt").read_text() == "dear\n"
    )


def test_a_run_without_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = run_folder.create_run(settings.load_settings("pocket/tiny"), tmp_path / "run")
    for act in (lambda: sample_run(run, ["a star"]), lambda: export_run(run, tmp_path / "mine")):
        with pytest.raises(InputError, match="neither final weights nor a checkpoint"):
            act()
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_folder(lora, tmp_path, monkeypatch, number, code):
    drawing = samples.sample_run_images

    def interrupted(**given):
        yield next(drawing(**given))
        signal.raise_signal(number)

    monkeypatch.setattr(samples, "sample_run_images", interrupted)
    answer = CliRunner().invoke(
        main.app, ["sample", str(lora), *PROMPTS, "--out", str(tmp_path / "out")]
    )
    assert answer.exit_code == code and list(tmp_path.iterdir()) == []


def test_a_run_from_elsewhere_is_sampled_without_its_rewards_and_its_model_stays_here(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path)
    note = read_json(run / "run.json")
    note["settings"] |= {"reward": "no_such_module:score", "eval_prompts": "/nowhere/prompts.txt"}
    write_json(run / "run.json", note)
    (image,) = sample_run(run, ["a star"], ["plain"])
    assert image["image"].size == (64, 64) and not run_folder.is_own_run(run)
    private = tmp_path / "private"
    shutil.copytree(fetch_model("pocket"), private)
    note["settings"] |= {"model": str(private)}
    write_json(run / "run.json", note)
    with pytest.raises(InputError, match="--trust"):
        export_run(run, tmp_path / "mine")
    note["settings"] |= {"reward": f"{tmp_path}/rewards.py:redness"}
    write_json(run / "run.json", note)
    card = (export_run(run, tmp_path / "mine", trust=True) / "README.md").read_text()
    assert (
        (tmp_path / "mine/vae").is_dir()
        and str(tmp_path) not in card
        and "rewards.py:redness" in card
    )


def test_a_link_out_of_the_run_is_no_weight(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path, lora_rank=2)
    (weights,) = (run / "final").glob("*.safetensors")
    weights.rename(tmp_path / "secret.safetensors")
    weights.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(InputError, match="lies outside of it"):
        export_run(run, tmp_path / "mine")


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "nan": lambda file: save_file({k: v * float("nan") for k, v in load_file(file).items()}, file),
    "changed": lambda file: save_file({k: v + 0.5 for k, v in load_file(file).items()}, file),
}


@pytest.mark.parametrize(
    ("damage", "noted"), [*((name, True) for name in DAMAGE), ("cut", False), ("nan", False)]
)
def test_damaged_final_weights_are_neither_drawn_nor_published(
    tmp_path, monkeypatch, damage, noted
):
    """One reader for all commands; without the hashes of run.json what no run can have written is still refused."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path, lora_rank=2)
    out = tmp_path / "made"
    if noted:
        run_folder.update_run_json(run, final_sha256=hash_files(run / "final"))
    (weights,) = (run / "final").glob("*.safetensors")
    DAMAGE[damage](weights)
    before = sorted(tmp_path.rglob("*"))
    words = [("export", run, out), ("sample", run, "a star", "--out", out), ("evaluate", run)]
    for command in words + [("profile", "--run", run, "--out", tmp_path / "p.html")] * noted:
        done = call(*command)
        assert (
            done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
        ), done.stderr
        assert ("not those that the training wrote" if noted else "are damaged") in done.stderr
        if noted:
            assert sorted(tmp_path.rglob("*")) == before
        assert not out.exists() and not (run / "evaluation").exists()


def test_a_card_quotes_no_file_that_a_foreign_run_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    run = make(tmp_path, lora_rank=2)
    secret = tmp_path / "secret.txt"
    secret.write_text("a password of ours\n")
    note = json.loads((run / "run.json").read_text())
    note["settings"]["eval_prompts"] = str(secret)
    named = settings.load_settings(note["settings"])
    note |= check_and_hash_inputs(named) | {
        "inputs": fingerprint_inputs(named)
    }  # as a stranger would have them
    (run / "run.json").write_text(json.dumps(note))
    for words in ((), ("--trust",)):
        done = call("export", run, tmp_path / f"made{len(words)}", *words)
        assert done.returncode == 0, done.stderr
        card = (tmp_path / f"made{len(words)}/README.md").read_text()
        assert ("a password of ours" in card) == bool(words), (
            "only a user who trusts the run may publish its prompts"
        )


def test_export_replaces_nothing(lora, tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    done = call("export", lora, tmp_path)
    assert done.returncode == 2 and "is not empty" in done.stderr and done.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    done = call("export", lora, tmp_path / "mine")
    assert done.returncode == 0 and "hf upload" in done.stdout
    made = sorted(file.name for file in (tmp_path / "mine").iterdir())
    assert made == ["README.md", "pytorch_lora_weights.safetensors"]


def test_the_widget_draws_what_is_typed(lora):
    box = sample_widget(lora, arms=["base", "hybrid"])
    field, seed, button = box.children[0].children
    assert [x["prompt"] for x in box.value] == [PROMPTS[0]] * 2 and box.page().count("<img") == 2
    field.value, seed.value = r"a $x_1$ <b>star</b>", 5
    button.click()
    (one, other) = box.value
    assert (one["prompt"], one["seed"], one["arm"], other["arm"]) == (
        field.value,
        5,
        "base",
        "hybrid",
    )
    assert "&lt;b&gt;" in box.page()
    again = sample_run(lora, [field.value], ["base"], [5])[0]["image"]
    assert (pixels(again) == pixels(one["image"])).all()


def test_settings_are_json_for_the_hub(lora, tmp_path):
    """The head of a card is what the hub reads, whatever the base is called."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(export_run(lora, tmp_path / "mine") / "README.md")
    assert card.data.pipeline_tag == "text-to-image" and "lora" in card.data.tags
    run_settings = settings.load_settings("paper/one-h200-lora")
    assert card_data(run_settings).to_yaml().count("FLUX.1-dev") == 2 and json.dumps(
        card.data.to_dict()
    )


def test_sample_warns_of_words_that_the_model_does_not_know(lora, monkeypatch, tmp_path):
    monkeypatch.setattr(samples, "sample_run", lambda **given: [])
    said = {
        text: CliRunner()
        .invoke(main.app, ["sample", str(lora), text, "--out", str(tmp_path / "out")])
        .output
        for text in ("a red castle", "a red star")
    }
    assert (
        "the model does not know the word castle" in said["a red castle"]
        and "warning" not in said["a red star"]
    )
