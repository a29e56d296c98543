"""What a scorer rejects is asked before anything is drawn, wherever the scorer runs."""

import json
import threading
import time

import pytest
import uvicorn
from commands import call, run
from fastapi.testclient import TestClient

from chunk_grpo import InputError
from chunk_grpo.core.settings import load_settings
from chunk_grpo.evaluation import benchmarks
from chunk_grpo.reward_serving import client, placement, server
from chunk_grpo.rewards import hpsv3, rewards
from chunk_grpo.training import state

GOOD = ["a red star"] * 30
BAD = "a <|im_end|> star"
OWN = """
class Strict:
    def __call__(self, images, prompts):
        assert not any("<|" in text for text in prompts), "it was scored"
        return [float(x.mean()) for x in images]

    def check_prompt(self, text):
        if "<|" in text:
            raise ValueError(f"{text} holds a mark")
"""


class Tokenizer:
    def get_added_vocab(self):
        return {"<|im_end|>": 1, "<|Reward|>": 2}


def test_hpsv3_rejects_special_tokens_before_it_scores():
    reward = hpsv3.HPSv3(Tokenizer(), None, None, 1, None, None)
    rewards.check_prompts({"hpsv3": reward}, GOOD)
    with pytest.raises(
        InputError,
        match="that the reward hpsv3 can score; prompt 31 cannot be scored: .*special token",
    ):
        rewards.check_prompts({"hpsv3": reward}, [*GOOD, BAD])


def test_the_package_of_hpsv3_rejects_marks_before_it_scores():
    from chunk_grpo.reward_serving.hpsv3_package import HPSv3PackageReward

    scorer = type("Scorer", (), {"device": "cpu"})()
    with pytest.raises(
        InputError, match="prompt 31 cannot be scored: ValueError: .*reserves for its own markers"
    ):
        rewards.check_prompts({"hpsv3": HPSv3PackageReward(scorer)}, [*GOOD, BAD])


@pytest.fixture
def own(tmp_path):
    """A folder with a reward that rejects marks, and lists with and without one."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "good.txt").write_text("\n".join(GOOD))
    (tmp_path / "bad.txt").write_text("\n".join([*GOOD, BAD]))
    return tmp_path


@pytest.mark.parametrize("field, place", [("prompts", ""), ("eval_prompts", "worker")])
def test_training_says_which_prompt_is_rejected_and_leaves_no_folder(field, place, own):
    other = {"prompts": "eval_prompts", "eval_prompts": "prompts"}[field]
    options = ['reward_options={"own:Strict": {"worker": true}}'] if place else []
    done = call(
        "train",
        "pocket/tiny",
        "reward=own:Strict",
        "eval_rewards=[]",
        *options,
        f"{field}=bad.txt",
        f"{other}=good.txt",
        "--out",
        "run",
        cwd=own,
    )
    assert done.returncode == 2 and not (own / "run").exists(), done.stderr
    (line,) = done.stderr.splitlines()
    assert (
        f"`{field}` must hold prompts that the reward own:Strict can score; prompt 31 cannot be scored"
        in line
    )
    assert "holds a mark" in line


def test_a_benchmark_says_which_prompt_is_rejected_before_it_draws(own):
    run(
        "train",
        "pocket/tiny",
        "iterations=1",
        "eval_steps=1",
        "hybrid_split=1",
        "--out",
        "run",
        "--no-report",
        cwd=own,
    )
    done = call("evaluate", "run", "--benchmark", "bad.txt", "--rewards", "own:Strict", cwd=own)
    assert done.returncode == 2 and "prompt 31 cannot be scored" in done.stderr
    assert not list((own / "run").glob("benchmarks/*/*"))


def test_a_served_reward_is_asked_before_the_run(own):
    space = {}
    exec(OWN, space)  # noqa: S102
    app = server.create_scoring_app("own", space["Strict"]())
    service = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    while not service.started:
        time.sleep(0.02)
    try:
        url = f"http://127.0.0.1:{service.servers[0].sockets[0].getsockname()[1]}"
        remote = client.load_remote_reward(url)
        assert remote.find_rejected_prompt(GOOD * 50) is None
        with pytest.raises(
            InputError,
            match="the reward own can score; prompt 1501 cannot be scored: .*holds a mark",
        ):
            rewards.check_prompts({"own": remote}, [*GOOD * 50, BAD], "eval_prompts")
        older = remote.model_copy(update={"server_info": {}})
        assert older.find_rejected_prompt([BAD]) is None  # a server that cannot be asked
    finally:
        service.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    "name",
    [
        "dpg.txt",
        "wise.txt",
        "dpg.csv",
        "geneval.jsonl",
        "WISE.txt",
        "hpd-test400.json",
        "hpd-bench3200.yaml",
        "dpg",
        "dpg.tsv:Prompt",
    ],
)
def test_a_list_named_as_a_benchmark_is_a_list(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = name.partition(":")[0]
    content = {
        "csv": "prompt\na cat\n",
        "tsv": "Prompt\na cat\n",
        "json": '["a cat"]',
        "yaml": "- a cat\n",
        "jsonl": json.dumps({"prompt": "a cat"}),
    }.get(file.rpartition(".")[2], "a cat\n")
    (tmp_path / file).write_text(content)
    task = benchmarks.load_benchmark_task(f"./{name}")
    assert task.prompts == ("a cat",) and type(task) is benchmarks.BenchmarkTask
    assert task.name.lower() not in ("geneval", "wise", "dpg", "hpd-test400", "hpd-bench3200")
    # No judge and no detector is asked for.
    task.check_inputs(benchmarks.ScoringInputs(scorers={"own": len}))
    assert benchmarks.load_benchmark_task("pocket:test").name == "pocket-test"
    with pytest.raises(InputError, match="`source` must be left out"):
        benchmarks.load_benchmark_task(f"./{name}", "here")


def test_rewards_without_a_check_take_all_prompts():
    rewards.check_prompts({"plain": lambda images, prompts: [0.0]}, [BAD])


@pytest.mark.parametrize("fault", ["prompt", "reward"])
def test_a_rejected_run_closes_the_rewards_that_it_loaded(tmp_path, monkeypatch, fault):
    """A worker of a reward would otherwise live as long as the notebook that started the run."""
    closed = []

    class Placed:
        def __call__(self, images, prompts):
            return [0.0] * len(images)

        def check_prompt(self, text):
            if fault == "prompt":
                raise ValueError("no")

        def close(self):
            closed.append(self)

    def load(name, **options):
        if fault == "reward" and name != "first:f":
            raise InputError("`reward` must be a function")
        return Placed()

    monkeypatch.setattr(placement, "load_placed_reward", load)
    run_settings = load_settings("pocket/tiny", {"reward": "first:f", "eval_rewards": ["second:f"]})
    with pytest.raises(InputError):
        state.prepare_state(run_settings, tmp_path)
    assert len(closed) == {"prompt": 2, "reward": 1}[fault]


def test_a_check_with_fewer_records_than_prompts_is_a_bad_request():
    """The reward's own check would otherwise fail inside the server."""

    class Strict:
        def __call__(self, images, prompts, records):
            return [0.0] * len(prompts)

        def check_record(self, record, prompt):
            """Accept everything."""

    with TestClient(server.create_scoring_app("strict", Strict())) as requests:
        answer = requests.post("/check", json={"prompts": ["a", "b"], "records": [{}]})
        assert answer.status_code == 400
        assert answer.json()["detail"] == "body must have one record per prompt; it has 1 for 2"
        answer = requests.post("/check", json={"prompts": ["a"], "records": [{}]})
        assert answer.json() == {"rejected": None}
