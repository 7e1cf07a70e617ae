"""The command line as a whole: help, version, spellings of options, vectors for any shell, ``~``, completion."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from small_runs import PPO, TINY
from test_documents import make_model
from typer.testing import CliRunner

import flexrlhf
from flexrlhf.cli import app
from flexrlhf.cli.app import HEADINGS
from flexrlhf.cli.errors import with_exit_codes
from flexrlhf.cli.options import RunOptions
from flexrlhf.config import spec_file
from flexrlhf.config.plugins import SHIPPED
from flexrlhf.config.setting_list import keys_from, setting_sections
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.data.quickstart import prepare_corpus
from flexrlhf.signals import Ending, StopSignal, handled

Invoke = Callable[..., str]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Return the output of a command, in a directory with ``a.yaml`` that is the home directory, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))

    def call(*words: str) -> str:
        result: Result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


# --- help


def test_the_help_has_every_command_in_a_line_of_its_group(invoke: Invoke) -> None:
    lines = invoke("--help").splitlines()
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(SHIPPED["commands"])
    for title, names in HEADINGS.items():
        start = lines.index(f"{title}:") + 1
        for name, line in zip(names, lines[start:], strict=False):
            assert line.split()[0] == name
            assert len(line) <= 80 and line.endswith(".") and not line.endswith("...")


def test_the_version_is_printed(invoke: Invoke) -> None:
    assert invoke("--version").startswith("flexrlhf ") and "torch 2." in invoke("--version")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_a_command_has_help(option: str, invoke: Invoke) -> None:
    assert "--placement-ratio" in invoke("run", option)


def test_the_help_loads_neither_frames_nor_models(tmp_path: Path) -> None:
    """What it loads is small, so that it comes within a second; times depend on the machine."""
    code = "import sys\ntry:\n    from flexrlhf.cli import main; main()\nfinally:\n    print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path)
    loaded = set(read_yaml(done.stdout.splitlines()[-1].replace("'", '"')))
    assert not loaded & {"rich", "torch", "numpy", "transformers", "httpx", "pebble", "tenacity", "huggingface_hub"}


# --- vectors, spellings and paths

FORMS = [
    ("--placement-ratio", "1,1,0.5,0.5"),
    ("--placement-ratio", "1, 1, 0.5, 0.5"),
    ("--placement-ratio", "[1,1,0.5,0.5]"),
    ("--placement-ratio=[1, 1, 1/2, 1/2]",),
    ("--placement_ratio", "1,1,0.5,0.5"),
    ("--set", "placement=1,1,0.5,0.5"),
]


@pytest.mark.parametrize("words", FORMS, ids=" ".join)
def test_a_vector_has_a_form_for_every_shell(words: tuple[str, ...], invoke: Invoke) -> None:
    assert "interleaving on 2 devices" in invoke("plan", "a.yaml", "--devices", "2", *words)


def test_the_version_is_an_attribute() -> None:
    assert flexrlhf.__version__ == version("flexrlhf")


@pytest.mark.parametrize("words", ["--resume", "--resume --devices 2", "--resume auto", "--resume=auto"])
def test_resume_is_automatic_without_a_value(words: str, invoke: Invoke) -> None:
    found = CliRunner().invoke(app, ["run", "a.yaml", "--fresh", *words.split()])
    assert "--fresh and --resume exclude each other" in found.output
    refused = CliRunner().invoke(app, ["run", "a.yaml", "--resume", "nowhere", "--dry-run"])
    assert "--resume nowhere: no such directory" in refused.output


def test_a_yaml_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for settings of models that one of two runs has, and for a vector of one of them."""
    read: list[Path] = []
    original = spec_file._read_mapping

    def recorded(path: Path) -> dict[str, Any]:
        read.append(path)
        return original(path)

    monkeypatch.setattr(spec_file, "_read_mapping", recorded)
    for name, algorithm in (("a", "ppo"), ("b", "dpo")):
        models = {"actor": {"init": TINY}} | ({"reward": {"init": TINY}} if name == "a" else {})
        written = {**PPO, "name": name, "algorithm": {"name": algorithm, "prompts_per_step": 8}, "models": models}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(written))
    paths, settings = [tmp_path / "a.yaml", tmp_path / "b.yaml"], ["models.reward.zero=0", "b:steps=2"]
    first, second = RunOptions(paths, placement_ratio="1,1,0.5,0.5", devices=2, set_=settings).specs()
    assert first.placement == (1, 1, Fraction(1, 2), Fraction(1, 2)) and second.placement is None
    assert first.models.reward is not None and second.models.reward is None and second.steps == 2
    assert read == paths


@pytest.mark.parametrize("shell", ["bash", "zsh", "sh"])
def test_the_form_without_brackets_passes_a_shell(shell: str, tmp_path: Path) -> None:
    try:
        done = subprocess.run(
            [shell, "-c", "echo --placement-ratio 1,1,0.5,0.5"], capture_output=True, text=True, cwd=tmp_path
        )
    except FileNotFoundError:
        pytest.skip(f"no {shell} here")
    assert done.stdout == "--placement-ratio 1,1,0.5,0.5\n"


# --- output, and Ctrl-C

CLOSED = """from flexrlhf.user_code.processes import keep_output
keep_output()
assert open('written', 'w').fileno() > 2
"""


@pytest.mark.parametrize("streams", ["| head -1", "> /dev/full 2>&1", ">&- 2>&- <&-"])
def test_output_that_cannot_be_written_ends_no_command(streams: str, tmp_path: Path) -> None:
    # a file of the current directory is no library
    (tmp_path / "signal.py").write_text("raise SystemExit('executed')")
    commands = f"-m flexrlhf settings {streams}; code=${{PIPESTATUS[0]}}", f"-P -c {shlex.quote(CLOSED)} {streams}"
    script = f"{sys.executable} {commands[0]}; {sys.executable} {commands[1]}; exit $((code + $?))"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "written").is_file()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.25, 0.5, 0.8])
def test_ctrl_c_in_the_first_second_ends_a_command_without_a_word(seconds: float, tmp_path: Path) -> None:
    """From where the command begins to load; Python itself has words of its own before."""
    hook = "lambda event, names: print(flush=True) if (event, *names[:1]) == ('import', 'flexrlhf.cli') else None"
    program = f"import sys; from flexrlhf.__main__ import main; sys.addaudithook({hook}); main()"
    command = [sys.executable, "-c", program, "plan"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    # a shell has 130 for both; 0 if the plan was printed before
    assert process.returncode in (-signal.SIGINT, 130, 0) and words == ""


@pytest.mark.parametrize(
    ("signals", "moment", "code"),
    [
        ((signal.SIGUSR1,), "flexrlhf.cli", 143),
        ((signal.SIGTERM,), "torch", 143),
        ((signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM, signal.SIGHUP) * 60, "flexrlhf.launch", 130),
    ],
)
def test_a_signal_before_the_first_step_has_an_exit_code_and_a_sentence(
    signals: tuple[signal.Signals, ...], moment: str, code: int, tmp_path: Path
) -> None:
    """From the first import of the command, and while the modules of ranks are loaded; many at once count as one."""
    hook = f"lambda event, names: print(flush=True) if (event, *names[:1]) == ('import', {moment!r}) else None"
    program = f"import sys; from flexrlhf.__main__ import main; sys.addaudithook({hook}); main()"
    command = [sys.executable, "-c", program, "run", "--set", "runs=runs"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "\n"
    for number in signals:
        process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == code
    assert re.fullmatch(r"flexrlhf: stopped by SIG\w+ before the first step; nothing is to be saved\n", words), words


def test_a_script_keeps_its_own_handlers_of_signals_that_nobody_sends_to_it() -> None:
    """While its ranks run, the usual ones end these, and the first of many raises one error."""
    own = [signal.signal(signal.SIGALRM, lambda *_: None), signal.getsignal(signal.SIGUSR2)]
    try:
        alarm = signal.getsignal(signal.SIGALRM)
        with handled(Ending()):
            assert signal.getsignal(signal.SIGALRM) is alarm and signal.getsignal(signal.SIGUSR2) is not own[1]
            with pytest.raises(StopSignal, match=r"^stopped by SIGUSR1 before"):
                os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            # whoever has caught it, no rank starts
            with pytest.raises(StopSignal, match=r"^stopped by SIGUSR1 before"):
                Ending.check_stopped()
        Ending.check_stopped()
        assert signal.getsignal(signal.SIGUSR2) is own[1]
    finally:
        signal.signal(signal.SIGALRM, own[0])


def test_a_checkout_needs_no_installation(tmp_path: Path) -> None:
    """A process that its command starts finds the same package."""
    (tmp_path / "flexrlhf").mkdir()
    child = "[sys.executable, '-P', '-m', 'flexrlhf.child']"
    files = {
        "__init__": "",
        "child": "",
        "cli": f"import subprocess, sys\ndef main():\n    subprocess.check_call({child})",
    }
    files |= {name: Path(flexrlhf.__file__).with_name(f"{name}.py").read_text() for name in ("__main__", "signals")}
    for name, text in files.items():
        (tmp_path / f"flexrlhf/{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "flexrlhf"], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory is exhausted (MemoryError)"),
        (ImportError("x.so: failed to map segment"), "memory is exhausted (x.so: failed to map segment)"),
        (RuntimeError("can't start new thread"), "memory is exhausted (can't start new thread)"),
        (
            FileNotFoundError(2, "No usable temporary directory found"),
            "found; make room in one, or set TMPDIR",
        ),
    ],
)
def test_exhausted_memory_and_disks_are_one_sentence(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit):
        with_exit_codes(command)()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flexrlhf: ") and words in line


def test_a_deleted_directory_is_one_sentence(tmp_path: Path) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m flexrlhf settings"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    words = "the current directory does not exist any more; change to another one"
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (2, [f"flexrlhf: {words}"])


def test_a_config_is_given_as_a_word_or_by_its_option(invoke: Invoke) -> None:
    plan = invoke("plan", "a.yaml")
    assert plan == invoke("plan", "--config", "a.yaml") == invoke("plan", "--config=~/a.yaml")
    assert plan == invoke("plan", "--config_path", "a.yaml") == invoke("plan", "--config-path=a.yaml")
    Path("b.yaml").write_text(yaml.safe_dump({**PPO, "name": "b"}))
    both = invoke("plan", "--config", "b.yaml", "a.yaml")
    assert both.index("b: ppo") < both.index("test: ppo")
    twice = CliRunner().invoke(app, ["slurm", "a.yaml", "--config", "b.yaml"])
    assert "--config b.yaml: this command takes one config, and a.yaml is given, too" in twice.stderr


SHARED = (
    *("--set", "data={path: runs/quickstart-corpus/prompts.jsonl, max_prompt_tokens: 16, max_response_tokens: 20}"),
    *("--set", "models.reward.init.vocab_size=386"),
)


def make_models() -> None:
    prepare_corpus()
    for name in ("actor", "critic"):
        make_model(name, "Causal")


def test_the_models_of_a_run_are_given_on_the_command_line(invoke: Invoke) -> None:
    """As in Fig. 5 of the paper."""
    make_models()
    words = ("--actor_model_path", "actor", "--critic-model-path", "~/critic", "--devices", "2")
    refused = CliRunner().invoke(app, ["plan", "a.yaml", "--actor-model-path", "nowhere"])
    assert "models.actor.path nowhere: no such directory; the current directory has actor, critic" in refused.stderr
    script = invoke("slurm", "a.yaml", *words, "--placement-ratio", "1,1,0.5,0.5")
    assert "--set 'models.actor.path=\"actor\"'" in script and "--placement-ratio 1,1,0.5,0.5" in script
    plans = {
        invoke(command, "a.yaml", *words, "--placement-ratio", "1,1,0.5,0.5", *further).partition("\n")[0]
        for command, *further in (
            ("plan",),
            ("run", "--dry-run", *SHARED),
        )
    }
    assert len(plans) == 1


def test_a_home_directory_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = Spec.parse(
        {
            "name": "a",
            "algorithm": {"name": "ppo", "ptx": {"path": "~/texts.jsonl"}},
            "models": {"actor": {"path": "~/m"}, "ref": {"path": "acme/model"}, "critic": {"init": TINY}},
            "data": {"sources": [{"path": "~/p.jsonl"}], "tokenizer": "~/t", "chat_template": "~/c.jinja"},
            "reward": {"function": "~/f.py:score"},
            "eval": {"path": "~/e.jsonl"},
            "debug": {"replay": "~/runs/b"},
            "runs": "~/runs",
        }
    )
    paths = (
        *(spec.algorithm.ptx.path, spec.models.actor.path, spec.data.sources[0].path, spec.data.tokenizer),
        *(spec.data.chat_template, spec.reward[0].function, spec.eval.path, spec.debug.replay, spec.runs),
    )
    assert all(path.startswith(f"{tmp_path}/") for path in paths)
    assert spec.models.ref.path == "acme/model"
    assert spec.directory == tmp_path / "runs" / "a"


def test_a_config_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    assert load_spec("~/a.yaml").name == PPO["name"]


# --- settings and completion


def test_all_settings_are_listed_with_a_meaning(invoke: Invoke) -> None:
    printed = invoke("settings").splitlines()
    keys = [section.key(row) for section in setting_sections() for row in section.rows]
    assert len(keys) > 200 and set(keys) <= set(printed)
    assert [section.key(row) for section in setting_sections() for row in section.rows if not row.meaning] == []


@pytest.mark.parametrize(
    ("text", "found", "absent"),
    [
        ("models.actor.optimizer", "models.ROLE.optimizer.learning_rate", "models.ROLE.zero"),
        ("models.all.dtype", "models.ROLE.dtype", "models.ROLE.zero"),
        ("grpo", "algorithm.samples_per_prompt", "algorithm.gae_lambda"),
        ("learning_rate", "algorithm.lagrange.learning_rate", "steps"),
        ("steps", "steps", "seed"),
        ("data.", "data.max_prompt_tokens", "rollout.engine"),
        ("placement.actor.ranks", "placement.MODEL.ranks", "placement.MODEL.ratio"),
    ],
)
def test_settings_are_found(text: str, found: str, absent: str, invoke: Invoke) -> None:
    lines = invoke("settings", text).splitlines()
    assert found in lines and absent not in lines


@pytest.mark.parametrize(
    ("start", "ends"),
    [
        ("models.actor.optimizer.le", ["models.actor.optimizer.learning_rate="]),
        ("models.cr", ["models.critic."]),
        ("models.al", ["models.all."]),
        ("models.all.zer", ["models.all.zero="]),
        ("step", ["steps="]),
        ("my-ppo:data.max_r", ["my-ppo:data.max_response_tokens="]),
        ("nothing.such", []),
    ],
)
def test_keys_are_completed(start: str, ends: list[str]) -> None:
    assert list(keys_from(start)) == ends


def completed(words: str, directory: Path) -> list[str]:
    """What bash offers for the last word, as its own script calls the command."""
    environment = {
        **os.environ,
        "_FLEXRLHF_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    code = "import sys; sys.argv[0] = 'flexrlhf'; from flexrlhf.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=directory)
    return done.stdout.split()


def test_a_shell_completes_commands_keys_and_configs(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ppo.yml").write_text("")
    assert completed("flexrlhf ver", tmp_path) == ["verify"]
    assert completed("flexrlhf plan --set algorithm.gae", tmp_path) == ["algorithm.gae_lambda="]
    assert completed("flexrlhf plan ", tmp_path) == ["a.yaml", "configs/"]
    assert completed("flexrlhf plan configs/", tmp_path) == ["configs/ppo.yml"]
    assert completed("flexrlhf run --config c", tmp_path) == ["configs/"]
    assert "safe-rlhf" in completed("flexrlhf settings s", tmp_path)
