"""Shell scripts of jobs: the commands that they would start, with their variables, and nothing run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexrlhf.errors import UserError
from flexrlhf.imports.launches import flags, overrides
from flexrlhf.imports.shell_script import ShellScript


def commands(text: str) -> list[tuple[str, ...]]:
    """Commands that a script would start."""
    return [command.words for command in ShellScript(text).commands]


SCRIPTS = {
    "a=1; b=${a}2; run $b": ["run 12"],
    "run ${x:-3} ${y:=4} $y ${x:+5}": ["run 3 4 4"],
    "run 'a $b' \"c  d\" e\\ f": ["run|a $b|c  d|e f"],
    "words=(one 'two three')\nwords+=(four)\nrun \"${words[@]}\" ${#words[@]} ${words[1]}": [
        "run|one|two three|four|3|two|three"
    ],
    "n=$((2 * (3 + 4) / 5)); run $n $((n * 7 % 4)) $((n > 1))": ["run 2 2 1"],
    "m=3; n=${N:-$((m * 4))}; run $n ${M:-a$((n / 2))}": ["run 12 a6"],
    'if [ -z "$x" ]; then run 1; else run 2; fi': ["run 1"],
    "a=5; if [[ $a -gt 4 && $a != 6 ]]; then run 1; elif true; then run 2; fi": ["run 1"],
    "if [ -f there ]; then run 1; else run 2; fi": ["run 2"],
    "case gpu2 in npu*) run 1;; gpu?|cpu) run 2;; *) run 3;; esac": ["run 2"],
    "for a in 1 2; do run $a; done": ["run 1", "run 2"],
    "f() { local name=$1; run $name $#; }; f x y; run $#": ["run x 2", "run 0"],
    "read -r -d '' text <<EOF\nrun a \\\n  --b $HOME/c\nEOF\nstart $text": ["start run a --b ~/c"],
    'srun -N 2 bash -c "pip install x && run a"': ["pip install x", "run a"],
    "path=/a/b.tar.gz; run ${path##*/} ${path%.gz} ${path%%.*}": ["run b.tar.gz /a/b.tar /a/b"],
    "run a 2>&1 | tee log; x=1 run b > out &": ["run a", "tee log", "run b"],
    "# run x\nrun a  # run y\n": ["run a"],
    "if [ $# -lt 2 ]; then echo usage; exit 1; fi\nrun $2": ["run|\0argument 2 of the script\0"],
    'a=1 b=2; run "$a $b ${a} $((a + b)) \\\n $b"': ["run|1 2 1 3  2"],
    "run $NAME/x": ["run \0NAME\0/x"],
    "device=$(which npu && echo npu || echo gpu); run $device": ["run gpu"],
    "a=b; run ${a^^} $((2 ** 3))": ["run|\0a^^\0|\0$((2 ** 3))\0"],
    "exit 0\nrun a": [],
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_starts_these_commands(text: str) -> None:
    found = [command.words for command in ShellScript(text).commands]
    expected = [tuple(line.split("|" if "|" in line else " ")) for line in SCRIPTS[text]]
    assert found == expected


def test_a_condition_that_depends_on_the_machine_is_a_sentence() -> None:
    script = ShellScript("if [ -d /data ]; then x=1; else x=2; fi; run $x")
    assert script.assumed == ["the condition [ -d /data ] is taken to be false"]


def test_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "made"
    ShellScript(f"touch {file}; x=$(touch {file}); `touch {file}`; eval 'touch {file}'")
    assert not file.exists()


def test_a_script_without_an_end_is_followed_for_a_while() -> None:
    ShellScript("f() { f; f; }; f")
    ShellScript('eval "$x"; while true; do run; done; for a in 1 2 3; do for b in 1 2 3; do run; done; done')


def test_given_variables_replace_those_of_the_script() -> None:
    assert ShellScript("n=1; run $n ${m:-2} $1", {"n": "5", "m": "6", "1": "a"}).commands[0].words == (
        "run",
        "5",
        "6",
        "a",
    )


def test_options_and_overrides() -> None:
    assert flags(("--a", "1", "2", "--b-c", "--d.e=f", "-x", "-1")) == {
        "a": "1 2",
        "b_c": "true",
        "d.e": "f",
        "x": "-1",
    }
    read = overrides(("a.b=1e-6", "+c=None", "++d='[1,2]'", "--e=f", "g@h=x", "i=True"))
    assert read == {"a.b": 1e-6, "c": None, "d": [1, 2], "g@h": "x", "i": True}


@pytest.mark.parametrize(
    "statement",
    [
        "run k=$A/$B/t",
        "run k=${A}/$B/t",
        "X=$A/$B/t; run k=$X",
        "export X=$A/$B/t Y=$A-$B/u; run k=$X",
        "X=(k=$A/$B/t); run ${X[@]}",
        "for x in $A/$B/t; do run k=$x; done",
        "read X <<< $A/$B/t; run k=$X",
    ],
)
def test_a_name_inside_an_unquoted_word_does_not_end_it(statement: str) -> None:
    assert commands(f"A=/r\nB=b\n{statement}\n") == [("run", "k=/r/b/t")]


@pytest.mark.parametrize(
    "text",
    [
        "cat <<EOF > run.sh\nrun $A\nEOF\nbash run.sh\n",
        "cat > run.sh <<'EOF'\nrun $1\nEOF\nchmod +x run.sh\n./run.sh /r\n",
        "cat <<EOF | bash\nrun $A\nEOF\n",
        "sbatch <<EOF\nrun $A\nEOF\n",
        "ssh host <<'EOF'\nrun \\\n  /r\nEOF\n",
        "ssh -p 22 host 'run /r'",
        "srun bash <<EOF\nbash -c 'run $A'\nEOF\n",
        'CMD="run $A"\neval "$CMD"',
        "kubectl apply -f - <<EOF\napiVersion: v1\nspec: {containers: [{command: [run], args: [$A]}]}\nEOF\n",
        "kubectl apply -f - <<EOF\napiVersion: v1\nspec: {containers: [{command: [sh, -c], args: ['run $A']}]}\nEOF\n",
    ],
)
def test_commands_in_texts_are_followed(text: str) -> None:
    found = commands(f"A=/r\n{text}")
    assert ("run", "/r") in found and {words[0] for words in found} <= {
        "run",
        "bash",
        "chmod",
        "sbatch",
        "kubectl",
        "ssh",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--nodes=2\n#SBATCH --gres=gpu:8", ("2", "8")),
        ("-N 2 --gpus-per-node=a100:8", ("2", "8")),
        ("-N2\n#SBATCH --gpus=16", ("2", "8")),
        ("--nodes 2 --ntasks-per-node=8 --gpus-per-task 1", ("2", "8")),
    ],
)
def test_options_of_slurm_are_variables(options: str, expected: tuple[str, str]) -> None:
    text = f"#!/bin/bash\n##SBATCH --nodes=9\n#SBATCH {options}\nrun $SLURM_NNODES $SLURM_GPUS_ON_NODE\n"
    assert commands(text) == [("run", *expected)]


def test_a_script_that_grows_without_an_end_is_refused_with_the_bound() -> None:
    for text, bound in (
        ("A=aaaaaaaa\n" + 'A="$A$A$A$A"\n' * 20, "MAX_TEXT"),
        ("A=(a a a a)\n" + 'A+=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 20, "MAX_EXPANDED"),
        ("if true; then\n" * 400 + ":\n" + "fi\n" * 400, "MAX_NESTING"),
        (f"X=$(({'(' * 3000}1{')' * 3000}))", "MAX_NESTING"),
    ):
        with pytest.raises(UserError, match=bound):
            ShellScript(text)


def test_statements_behind_a_long_loop_are_followed() -> None:
    script = ShellScript("f() { f; f; }\nf\n" + "x=1\n" * 300 + "run")
    assert script.commands[-1].words == ("run",) and "MAX_STEPS" in script.assumed[0]


def test_numbers_have_64_bits_and_secrets_no_value() -> None:
    assert commands("X=9223372036854775807\nrun $((X + 1))") == [("run", "-9223372036854775808")]
    assert "s3cr" not in str(commands("export WANDB_API_KEY=s3cr\nHF_TOKEN=s3cr\nrun $WANDB_API_KEY-$HF_TOKEN"))
