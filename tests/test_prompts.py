"""Of a long list of prompts a run encodes those that it draws, once."""

import pytest

from chunk_grpo.core import settings
from chunk_grpo.models.flux import FluxPolicy
from chunk_grpo.training import iteration, trainer

SMALL = {"iterations": 3, "prompts_per_iteration": 2, "images_per_prompt": 2, "steps": 3, "chunks": "1,1", "threads": 1,
         "eval_count": 2, "eval_steps": 1, "hybrid_split": 1, "eval_every": 0, "eval_rewards": [],
         "reward": "tiny_rewards:red"}


@pytest.fixture
def encoded(monkeypatch, tmp_path):
    "The prompts that were encoded, in a store of the test's own."
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    found, embed = [], FluxPolicy.embed

    def watched(self, pipe, prompts):
        found.extend(prompts)
        return embed(self, pipe, prompts)

    monkeypatch.setattr(FluxPolicy, "embed", watched)
    return found


def test_a_run_on_20000_prompts_encodes_those_it_draws(encoded, tmp_path):
    "Six of twenty thousand, and two of a hundred held out; when it goes on, only what is new."
    (tmp_path / "train.txt").write_text("".join(f"a red star {i}\n" for i in range(20_000)))
    (tmp_path / "test.txt").write_text("".join(f"a blue square {i}\n" for i in range(100)))
    files = {"prompts": str(tmp_path / "train.txt"), "eval_prompts": str(tmp_path / "test.txt")}
    (tmp_path / "run").mkdir()
    for iterations, wanted in ((3, 3 * 2 + 2), (3, 0), (4, 2)):
        encoded.clear()
        s = settings.load_settings("pocket/tiny", SMALL | files | {"iterations": iterations})
        trainer.train_run(s, tmp_path / "run")
        assert len(encoded) == len(set(encoded)) == wanted
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 10


def test_processes_share_the_prompts(monkeypatch, tmp_path):
    "Together they need what one alone needs, and no prompt of an iteration is needed twice."
    s = settings.load_settings("pocket/tiny", SMALL | {"prompts_per_iteration": 4, "eval_count": 6})

    def needed(rank, processes):
        accelerator = type("A", (), {"process_index": rank, "num_processes": processes})
        texts = [f"train {i}" for i in range(1000)], [f"test {i}" for i in range(50)]
        return iteration.needed_prompts(iteration.TrainingState(s, tmp_path, accelerator, *texts, {}, {}, None))

    alone, parts = needed(0, 1), [needed(rank, 4) for rank in range(4)]
    assert set().union(*parts) == set(alone) and len(alone) == 3 * 4 + 6
    assert all(sum(text.startswith("train") for text in part) == 3 for part in parts)
