"""The front page: its pictures are figures of the book, and its numbers are measured ones."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import nbformat
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import chunk_grpo
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models import inputs
from chunk_grpo.pocket import pocket_model_path
from chunk_grpo.rewards.rewards import load_reward
from chunk_grpo.studies import analysis
from chunk_grpo.studies.design import load_study
from chunk_grpo.theory.chunks import Chunks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
KEPT = ROOT / "runs/results/images/demo"
sys.path.insert(0, str(ROOT / "tools"))
import gpu_results  # noqa: E402
import readme  # noqa: E402


def test_the_readmes_pictures_are_figures_that_the_book_keeps():
    pictures = readme.pictures()
    names = {"steps_and_chunks.png", "wrong_to_right.png", "methods.png"}
    assert {file.name for file in pictures} == names
    assert not [file.name for file, content in pictures.items() if file.read_bytes() != content], (
        "run `make prepare`"
    )


def test_pictures_can_be_read_on_a_phone_and_are_sharp_on_a_wide_screen():
    """Figures are 7 inches wide, so 11 points are 8.5 px on a screen of 390 px, and no text is smaller."""
    for file in readme.pictures():
        assert Image.open(file).width >= 2 * 830, "a README column is 830 px wide"
    for page in ("findings/confirmation", "findings/referee", "12_reporting/00_figures"):
        cells = nbformat.read(ROOT / f"nbs/{page}.ipynb", as_version=4).cells
        (source,) = [
            cell.source
            for cell in cells
            if cell.source.startswith("# The README shows this figure")
        ]
        assert "size=(7.0, " in source and "dpi=240" in source
        assert not [
            size
            for size in re.findall(r"(?:font.size\"?:|fontsize=) ?([\d.]+)", source)
            if float(size) < 11
        ]


def test_images_that_training_mended_are_wrong_before_and_right_after():
    kept = json.loads(KEPT.with_suffix(".json").read_text())
    sheet = Image.open(KEPT.with_suffix(".png"))
    side = kept["side"]
    rewards = {name: load_reward(name) for name in ("pocket-clip", "pocket-geneval")}
    mended = 0
    for down, row in enumerate(kept["rows"]):
        places = [(column * side, down * side) for column in range(len(kept["iterations"]))]
        images = [sheet.crop((x, y, x + side, y + side)) for x, y in places]
        for name, reward in rewards.items():
            scores = reward(images, [row["prompt"]] * len(images))
            torch.testing.assert_close(scores, torch.tensor(row["scores"][name]), atol=2e-3, rtol=0)
        verdicts = row["scores"]["pocket-geneval"]
        mended += verdicts[0] == 0 and verdicts[-1] == 1
    assert mended == 4


def test_chunk_ratios_of_the_hero_figure_are_the_geometric_means_of_its_step_ratios():
    """To first order the mean of the distances from 1, as the page prints them."""
    cells = nbformat.read(ROOT / "nbs/findings/confirmation.ipynb", as_version=4).cells
    (printed,) = [
        out.text
        for cell in cells
        for out in cell.get("outputs", ())
        if "advantage -" in out.get("text", "")
    ]
    steps, four = ([float(x) for x in line.split()[1:]] for line in printed.splitlines()[1:])
    parts = [steps[part] for part in Chunks.parse("2,3,4,7").slices]
    assert not [
        part
        for part, ratio in zip(parts, four, strict=True)
        if abs(sum(part) / len(part) - ratio) > 0.1
    ]
    assert (sum(x < -1 for x in steps), sum(x < -1 for x in four)) == (5, 1), (
        "as the title of the figure says"
    )


INDEX = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4).cells
TRAINERS = (
    "yifan123/flow_grpo",
    "XueZeyue/DanceGRPO",
    "X-GenGroup/Flow-Factory",
    "verl-project/verl-omni",
)


def section(title: str) -> str:
    """Return the README's text below a heading."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of a markdown table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_first_screen_holds_what_it_does_the_install_lines_the_command_and_a_chunk():
    first = README.split("\n## ")[0]
    places = [
        first.index(words)
        for words in ("Fine-tune FLUX", "git clone", "make demo", "steps_and_chunks.png")
    ]
    assert places == sorted(places)
    assert len(first) < 2000, "more would push the figure off the first screen"


def test_no_line_of_code_is_cut_at_the_width_of_a_repository_page():
    blocks = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
    assert len(blocks) > 4
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 90]


def test_each_claim_about_another_trainer_links_to_the_file_that_says_so():
    rows = table_rows(section("Why not another trainer?"))
    assert len(rows) >= 8
    for row in rows:
        for name, cell in zip(TRAINERS, row[2:], strict=True):
            without_links = re.sub(r"\[[^\]]+\]\([^)]+\)", "", cell)
            assert not re.search(r"\w", without_links), (
                f"{row[0]}, {name}: no source of {without_links!r}"
            )
            for link in re.findall(r"\]\(([^)]+)\)", cell):
                assert re.match(rf"https://github\.com/{name}/blob/[0-9a-f]{{40}}/\S+$", link), link


def test_comparison_says_what_others_have_and_this_has_not():
    mine = {row[0]: row[1] for row in table_rows(section("Why not another trainer?"))}
    assert (
        mine["image editing; video"].endswith("tested as miniatures; no")
        and "none" in mine["results on released models"]
    )


def test_methods_and_pipelines_of_the_front_page_are_those_of_the_package():
    every = yaml.safe_load((ROOT / "runs/methods.yaml").read_text())
    methods = {
        name: row for name, row in every.items() if row["source"] not in ("ours", "our choice")
    }
    published, ours = len(methods), len(every) - len(methods)
    assert (
        f"{published - 1} other published methods and {ours} variants of our own" in README
        and f"lists **{len(every)} methods**" in README
        and f"{published} are published:" in README
        and f"The other {ours} are variants of our own." in README
    )
    assert {"chunk", "flow", "dance", "mix", "nft"} <= set(
        methods
    ) and f"and {published - 5} more" in README
    assert dict.fromkeys(
        row[1] for row in table_rows(section("Why not another trainer?")) if row[0] == "methods"
    ) == {f"{published} published, {ours} of our own": None}
    said = {
        "FLUX.1": "FluxPipeline",
        "Stable Diffusion 3 and 3.5": "StableDiffusion3Pipeline",
        "Qwen-Image": "QwenImagePipeline",
        "Z-Image": "ZImagePipeline",
        "FLUX.2-klein": "Flux2KleinPipeline",
        "FLUX.1-Kontext": "FluxKontextPipeline",
        "Qwen-Image-Edit": "QwenImageEditPipeline",
    }
    assert set(said.values()) == set(inputs.FAMILIES)
    assert not [name for name in said if name not in section("Which models, which GPU?")]


def test_memory_of_the_front_page_is_that_of_the_presets():
    """The page on a GPU host has the numbers of `plan`, and a test of its own."""
    page = nbformat.read(ROOT / "nbs/14_cli/12_gpu_host.ipynb", as_version=4).cells
    (text,) = [cell.source for cell in page if "| preset | GPU memory, GB |" in cell.source]
    memory = {row[0].removeprefix("machines/"): row[1] for row in table_rows(text)}
    names = {
        "FLUX.1-dev": ("80gb-lora-flux1-dev", "8x80gb-full-flux1-dev"),
        "FLUX.2-klein-base-4B": ("24gb-lora-flux2-klein", "8x80gb-full-flux2-klein"),
        "Stable Diffusion 3.5 medium": ("24gb-lora-sd35-medium", "8x80gb-full-sd35-medium"),
        "Qwen-Image": ("80gb-lora-qwen-image", "8x80gb-full-qwen-image"),
    }
    rows = {row[0]: tuple(row[1:]) for row in table_rows(section("Which models, which GPU?"))}
    assert rows == {
        model: tuple(f"{memory[name]} GB" for name in pair) for model, pair in names.items()
    }
    for name in memory:
        if (ROOT / f"runs/machines/{name}.yaml").is_file():
            settings = load_settings(f"machines/{name}")
            assert settings.resolution == (512 if name.startswith("24gb") else 720)
            assert settings.reward in ("hpsv3", "pickscore")


def test_what_ran_on_a_gpu_is_what_its_files_hold():
    text = " ".join(section("What was measured on a GPU?").split())
    found = gpu_results.read_results()
    assert (
        set(found) == {1, 2} and "2 of 10 checks" in text and "both checks count as failed" in text
    )
    assert {result["verdict"] for result in found.values()} == {"failed"}
    update, ratios = (found[number]["parts"] for number in (1, 2))
    blocks = update.pop("one double and one single block")
    assert blocks["finite"] and blocks["cosine of gradients"] > 0.99999
    assert all(part["finite"] for part in update.values())
    over = [
        part["peak_gb"] / part["planned_gb"]
        for name, part in update.items()
        if "with checkpointing" in name
    ]
    assert all(1.2 < share < 1.3 for share in over) and "a quarter more memory" in text
    assert [name for name, part in ratios.items() if "failed" in part] == ["bfloat16, compiled"]
    largest = max(
        batch["steps, largest"]
        for part in ratios.values()
        for name, batch in part.items()
        if name.startswith("replay")
    )
    assert largest < 3e-7 and "within 3e-7 of 1" in text


def test_results_say_what_was_trained_on():
    text = section("Does it work?")
    assert "The demo trains on the checker that it reports" in text
    assert "pocket-geneval" in load_settings("pocket/demo").reward
    arms = analysis.load_study_rows("rewards")
    assert {row["settings"]["reward"] for row in arms if row["arm"] == "clip"} == {"pocket-clip"}
    assert "Training on `pocket-clip` alone also raises the checker's score" in text


def test_captions_have_the_numbers_of_their_figures():
    kept = json.loads(KEPT.with_suffix(".json").read_text())
    verdicts = [row["scores"]["pocket-geneval"] for row in kept["rows"]]
    mended = sum(row[0] == 0 and row[-1] == 1 for row in verdicts)
    text = " ".join(section("Does it work?").split())
    assert f"{mended} of the {len(verdicts)} images that a demo run stored" in text
    before, after = (int(sum(row[end] for row in verdicts)) for end in (0, -1))
    assert (
        f"accepts {before} before training and {after} after {kept['iterations'][-1]} iterations"
        in text
    )
    rows = analysis.load_study_rows("confirmation")
    assert {sum(row["arm"] == arm for row in rows) for arm in ("steps", "2-3-4-7")} == {32}
    assert "mean of 32 seeds" in README


def test_the_picture_of_all_methods_has_the_numbers_of_its_study():
    text = section("Which method?")
    seeds = {}
    for name in ("referee-field", "referee"):  # arms that both have are those of the second
        rows = analysis.load_study_rows(name)
        for arm in load_study(name).arms:
            seeds[arm] = len({row["seed"] for row in rows if row["arm"] == arm})
    assert f"Left: {len(seeds)} arms" in text and set(seeds.values()) == {8, 16, 32}
    prompts = rows[0]["settings"]["eval_prompts"]
    assert f"on {len(inputs.read_prompts(prompts))} test prompts" in text
    assert "mean over 8, 16 or 32 seeds" in text


def test_bundled_model_has_as_many_parameters_as_the_front_page_says():
    files = Path(pocket_model_path()).glob(
        "*/*.safetensors"
    )  # text encoders, transformer, autoencoder
    assert (
        round(sum(tensor.numel() for file in files for tensor in load_file(file).values()) / 1e6)
        == 2
    )
    assert "the bundled FLUX of 2 million parameters" in README


def test_the_method_in_four_lines_is_the_papers_and_the_demo_differs_as_said():
    paper = load_settings("paper/chunk")
    demo = load_settings("pocket/demo")
    text = section("The method in four lines")
    assert (paper.images_per_prompt, paper.steps, paper.chunks, paper.chunk_fraction) == (
        12,
        17,
        "2,3,4,7",
        0.5,
    )
    for words in (
        "12 images per prompt",
        "17 steps",
        "16 stochastic steps",
        "2, 3, 4 and 7",
        "half of the chunks",
    ):
        assert words in text
    assert (
        demo.steps == 13
        and demo.chunks != paper.chunks
        and "The demo uses 13 steps and other chunks" in text
    )


def test_install_says_the_versions_and_sizes_that_were_measured():
    text = " ".join(section("Install").split())
    measured = json.loads((ROOT / "runs/results/install.json").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert (
        "Python 3.11, 3.12 or 3.13" in text
        and "for python in python3.11 python3.12 python3.13" in makefile
    )
    assert (
        f"min_python = {text.split('Python ')[1].split(',')[0]}"
        in (ROOT / "settings.ini").read_text()
    )
    cpu, cuda = measured["cpu"], measured["cuda"]
    for build in (cpu, cuda):
        sizes = f"{build['download_gb']} GB and the environment takes {build['disk_gb']} GB"
        assert f"pip downloads about {sizes}" in text
    if torch.__version__.endswith("+cpu"):
        own = {dist.metadata["Name"]: dist for dist in importlib.metadata.distributions()}.values()
        files = [file.locate() for dist in own for file in dist.files or ()]
        assert (
            abs(sum(file.stat().st_size for file in files if file.is_file()) / 1e9 - cpu["disk_gb"])
            < 0.3
        )


def test_make_targets_of_the_front_page_exist():
    targets = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert {name for pair in targets for name in pair if name} >= {
        "demo",
        "install",
        "lab",
        "docs",
        "gpu",
    }
    assert not [
        a or b for a, b in targets if not re.search(rf"^{a or b}:.*##", makefile, re.MULTILINE)
    ]


def test_citation_names_the_paper_and_this_version():
    text = section("Citation and licence")
    assert "arXiv:2510.21583" in text and f"version = {{{chunk_grpo.__version__}}}" in text
    assert "Apache License 2.0" in text and "Apache License" in (ROOT / "LICENSE").read_text()[:200]


HELD = {  # the numbers of the prose that a test above holds, by what they count
    "paper": ["2510.21583", "12", "17", "16", "2", "3", "4", "7"],
    "methods": ["43", "16", "60", "44", "39"],
    "figures": ["4", "16", "7", "11", "60", "32", "95", "5", "1", "2"],
    "install": ["3.11", "3.12", "3.13", "2.4", "3.2", "6.4"],
    "presets": ["512", "720", "24", "80", "3", "3.5"],
    "demo": ["2", "13", "64"],
    "referee": ["25", "192", "8", "16", "32", "95"],
    "licence": ["2.0"],
    "gpu": ["3", "7", "1", "2"],
}


def test_each_number_of_the_prose_is_held_by_a_test():
    prose = "\n".join(cell.source for cell in INDEX if cell.cell_type == "markdown")
    prose = re.sub(
        r"```.*?```", "", prose, flags=re.DOTALL
    )  # commands and code have tests of their own
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # where links lead
    prose = re.sub(
        r"^(\|.*\||\d\. )", "", prose, flags=re.MULTILINE
    )  # tables, and the numbers of lists
    prose = re.sub(r"FLUX\.\d|in 2026", "", prose)
    numbers = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", prose))
    measured = json.loads((ROOT / "runs/results/install.json").read_text())["cpu"]["download_gb"]
    assert not numbers - {number for group in HELD.values() for number in group} - {str(measured)}
