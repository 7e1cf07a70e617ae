"""The YAML schema: refusals and their sentences, exact numbers, and the way back to YAML."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from small_runs import PPO, spec_of

from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementEntry, PlacementMap
from flexrlhf.config.ratio_vector import vector_of_option
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import SpecFile, load_spec
from flexrlhf.config.yaml_io import read_yaml, write_yaml
from flexrlhf.errors import UserError, nearest

SIX = ("actor.shadow", "critic.shadow", "actor", "critic", "ref", "reward")


def written(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump(PPO | changes))
    return path


# --- values


BETAS = "models.actor.optimizer.betas"


def test_the_largest_values_are_taken() -> None:
    spec = spec_of(None, 2, f"seed={2**63 - 1}", f"{BETAS}=[0, 0.999]", "timeout_seconds=1", "sync.bucket_mb=0.001")
    assert spec.seed == 2**63 - 1
    assert spec.models.actor is not None
    assert spec.models.actor.optimizer.betas == (0, 0.999)


@pytest.mark.parametrize("key", ["name", "algorithm", "models", "data"])
def test_a_required_key_is_named_when_missing(key: str) -> None:
    with pytest.raises(UserError, match=key):
        Spec.parse({name: value for name, value in PPO.items() if name != key})


# --- exact numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", Fraction(1)),
        ("0.375", Fraction(3, 8)),
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("1e-1", Fraction(1, 10)),
    ],
)
def test_ratios_are_read_exactly(text: str, value: Fraction) -> None:
    spec = spec_of(None, 2, f"placement=[{text}, {text}, {text}, {text}]")
    assert spec.placement == (value,) * 4


# --- models: optimizer, adapters, shadow


def model_of(*overrides: str) -> ModelSpec:
    model = spec_of(None, 2, *overrides).models.actor
    assert model is not None
    return model


SHADOW = "{engine: deepspeed, zero: 3, dtype: bfloat16, micro_batch_tokens: 7}"


def test_a_shadow_has_the_settings_of_its_role_but_for_its_own() -> None:
    model = model_of(f"models.actor.shadow={SHADOW}", "models.actor.zero=2", "models.actor.logits_mb=3")
    shadow = model.of_shadow
    assert (shadow.engine, shadow.zero, shadow.dtype, shadow.micro_batch_tokens) == ("deepspeed", 3, "bfloat16", 7)
    assert (shadow.tp, shadow.generate_tokens, shadow.logits_mb, shadow.init) == (1, 65536, 3, model.init)
    assert shadow.shadow is None
    assert (model.engine, model.zero, model.dtype) == ("torch", 2, "float32")


def test_without_settings_of_its_own_a_shadow_is_like_its_role() -> None:
    model = model_of("models.actor.zero=3")
    assert model.of_shadow == model
    assert model_of("models.actor.zero=3", "models.actor.shadow={}").of_shadow == model


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ("{}", {"offload_parameters": True, "config": {"steps_per_print": 1}}),
        ("{engine: torch}", {"offload_parameters": False, "config": {}}),
        ("{zero: 0}", {"offload_parameters": False, "config": {"steps_per_print": 1}}),
    ],
)
def test_a_shadow_drops_what_it_has_no_use_for(own: str, kept: dict[str, object]) -> None:
    """Settings for training alone, and settings of another engine's library."""
    role = (
        "{engine: deepspeed, zero: 3, offload_optimizer: true, offload_parameters: true, config: {steps_per_print: 1}}"
    )
    shadow = model_of(f"models.actor={role}", f"models.actor.shadow={own}").of_shadow
    assert not shadow.offload_optimizer
    assert {name: getattr(shadow, name) for name in kept} == kept


def test_a_shadow_may_undo_what_its_role_sets() -> None:
    """Also by the value that is the default."""
    model = model_of("models.actor.zero=3", "models.actor.tp=2", "models.actor.shadow={zero: 0, tp: 1}")
    assert (model.of_shadow.zero, model.of_shadow.tp) == (0, 1)


# --- there and back


def test_a_dumped_mapping_has_the_form_that_a_user_writes() -> None:
    spec = spec_of({"actor": 1, "critic": 1, "ref": 0.5, "reward": {"ranks": [1]}, "train_share": 0.5})
    dumped = yaml.safe_load(spec.dump())["placement"]
    assert set(dumped) == {"actor", "critic", "ref", "reward", "train_share", "span_classes"}
    written = {name: dumped[name] for name in ("ref", "reward")}
    assert {key: value for key, value in written["ref"].items() if value is not None} == {"ratio": 0.5}
    assert {key: value for key, value in written["reward"].items() if value is not None} == {"ranks": [1]}


def test_the_settings_of_the_mapping_form_are_no_models() -> None:
    spec = spec_of(dict.fromkeys(SIX, 0.5) | {"train_share": "1/2", "span_classes": True})
    assert isinstance(spec.placement, PlacementMap)
    assert tuple(spec.placement.models) == SIX
    assert (spec.placement.train_share, spec.placement.span_classes) == (Fraction(1, 2), True)


def test_the_form_of_our_own_code() -> None:
    entries = {name: PlacementEntry(ratio=Fraction(1, 2)) for name in SIX}
    assert PlacementMap(models=entries, train_share=Fraction(1, 2)).models == entries


# --- files and overrides


def test_on_is_a_key_and_not_true(tmp_path: Path) -> None:
    """YAML 1.1 reads ``on`` as true."""
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(PPO) + "placement: {actor: 1, critic: 1, ref: {ratio: 1, on: V100}, reward: 1}\n")
    placement = load_spec(path).placement
    assert isinstance(placement, PlacementMap)
    assert placement.models["ref"].on == "V100"


def test_a_number_with_an_exponent_is_no_string() -> None:
    """YAML 1.1 reads ``1e-6`` as a string, which a model's config would keep."""
    spec = spec_of(None, 2, "models.actor.init={rms_norm_eps: 1e-6}", "models.actor.optimizer.learning_rate=1e-3")
    assert spec.models.actor is not None
    assert spec.models.actor.init == {"rms_norm_eps": 1e-6}
    assert spec.models.actor.optimizer.learning_rate == 1e-3


def test_overrides_are_read_as_yaml_and_make_what_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml")
    overrides = ("algorithm.temperature=0.7", "models.critic.engine=torch", "placement=[1,1,0.5,0.5]", "eval.path=b=c")
    spec = load_spec(path, overrides)
    assert spec.algorithm.temperature == 0.7  # type: ignore[union-attr]
    assert spec.models.critic is not None
    assert spec.placement == (1, 1, Fraction(1, 2), Fraction(1, 2))
    assert spec.eval is not None and spec.eval.path == "b=c"


def test_a_scoped_override_is_for_the_run_of_that_name(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.yaml", name="first"), written(tmp_path / "b.yaml", name="second")
    overrides = ("first:steps=7", "seed=5")
    specs = [load_spec(path, overrides) for path in (first, second)]
    assert [(spec.steps, spec.seed) for spec in specs] == [(7, 5), (3, 5)]


def test_an_override_for_a_run_that_is_not_there_is_refused() -> None:
    SpecFile.check_scopes(("first:steps=7", "steps=7"), ["first"])
    with pytest.raises(UserError, match=r"--set fist:steps=7.*'fist'.*did you mean 'first'"):
        SpecFile.check_scopes(("fist:steps=7",), ["first"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", ("--set steps", "key=value")),
        ("=3", ("--set =3", "key=value")),
        ("steps.more=3", ("--set steps.more=3", "steps is 3", "not a mapping")),
        ("steps=[1", ("--set steps=[1", "not YAML")),
        ("name=\udce6", ("its character 1 is none in the locale's encoding", "set PYTHONUTF8=1")),
        ("eval={path: a, path: b}", ("--set eval={path: a, path: b}", "'path' is given twice")),
        ("name.more=null", ("--set name.more=null", "name is 'test'", "not a mapping")),
    ],
)
def test_a_malformed_override_is_refused(override: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_spec(written(tmp_path / "a.yaml"), (override,))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", ("not YAML", "(line 1, column 6)")),
        ("#" * 2_000_001, ("not YAML", "it has 2000001 characters, more than the 2000000")),
        ("a: b: c", ("not YAML", "(line 1, column 5)")),
        ("a: \0", ("not YAML", "not allowed", "#x00, character 4")),
        ("- 1", ("mapping", "found a list")),
        ("1", ("mapping", "found a single value")),
        ("", ("mapping", "found nothing")),
        ("steps: 1\nname: x\nsteps: 2", ("'steps' is given twice", "first in line 1", "(line 3, column 1)")),
        ("name: x\nsave:\n  every: 1\n  every: 2", ("'every' is given twice", "first in line 3", "(line 4, column 3)")),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_spec(path)
    assert all(word in str(caught.value) for word in (str(path), *words))
    assert "\n" not in str(caught.value)
    assert "unicode string" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match="model.bin: not a text file"):
        load_spec(path)


def test_a_key_of_a_merge_may_be_given_again() -> None:
    text = "all:\n- {deep: &part {<<: &base {a: 1, b: 1}, b: 2}}\n- {<<: *part, b: 3}"
    assert read_yaml(text) == {"all": [{"deep": {"a": 1, "b": 2}}, {"a": 1, "b": 3}]}


def test_a_date_is_a_text() -> None:
    """YAML 1.1 reads a date, and stops with a traceback at a day that no month has."""
    assert read_yaml("[2026-01-31, 2026-13-40]") == ["2026-01-31", "2026-13-40"]
    assert read_yaml(write_yaml(["2026-01-31"])) == ["2026-01-31"]


def test_nan_in_a_config_is_written_as_it_is() -> None:
    assert "x: .nan" in spec_of(None, 2, "models.actor.init.x=.nan").dump()


@pytest.mark.parametrize(
    ("text", "value"), [("010", 10), ("1:30", "1:30"), ("0x1F", 31), ("0o17", 15), ("-3", -3), ("=", "=")]
)
def test_whole_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """YAML 1.1 reads a 0 in front as base 8, and a colon as base 60."""
    assert read_yaml(text) == value and read_yaml(write_yaml([value])) == [value]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps: 010", "010 is 10 here, and another number to readers of YAML 1.1; write 10 (line 1, column 8)"),
        ("a: [{b: ${NAME}}]", "within [] or {} put a text with ${NAME} in quotes"),
    ],
)
def test_settings_that_other_readers_take_otherwise_are_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_spec(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("/nope", ["/opt", "/home"], None),
        ("/models/lama", ["/models/bert", "/models/llama"], "/models/llama"),
        ("/a/long/folder/first", ["/a/long/folder/other"], None),
        ("ref.shado", ["ref", "actor.shadow"], None),
        ("wandb", ["reward", "samples"], None),
        ("gemma-2-9b", ["llama-2-7b"], None),
        ("one", ["one"], None),
        ("micro_batch", ["micro_batch_tokens"], "micro_batch_tokens"),
        ("LearningRate", ["learning_rate"], "learning_rate"),
        ("critic.rollout", ["critic", "actor.rollout"], None),
        ("zzz", ["ref"], None),
    ],
)
def test_the_nearest_name(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == (f" (did you mean {found!r}?)" if found else "")


def test_a_missing_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path / "ppo.yaml")
    with pytest.raises(UserError, match=r"ppp.yaml: no such file; /.* has ppo.yaml$"):
        load_spec(tmp_path / "ppp.yaml")
    with pytest.raises(UserError, match="no such file; a setting is given as --set models.actor.zero=3$"):
        load_spec(Path("models.actor.zero=3"))
    with pytest.raises(UserError, match="no such file: the directory .*nowhere does not exist$"):
        load_spec(tmp_path / "nowhere" / "ppo.yaml")


def test_a_ratio_vector_of_the_command_line() -> None:
    assert vector_of_option("[1,1,0.5,1/2]") == [1, 1, 0.5, "1/2"]
    assert vector_of_option("1, 1,0.5 ,1/2") == vector_of_option("[1, 1, 0.5, 1/2]")
    assert vector_of_option("0.5") == [0.5]
    for text in ("half", "1,", "[1", "{a: 1}", "a.yaml", "/a/b.yaml,1"):
        with pytest.raises(UserError, match="--placement-ratio.*expected a vector"):
            vector_of_option(text)


# --- rollouts


def test_settings_as_by_default_go_with_transformers() -> None:
    plain = spec_of(None, 2, "rollout.engine=transformers").rollout
    assert spec_of(None, 2, "rollout={engine: transformers, tp: 1, parity: {every: 10}}").rollout == plain


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=5", "min_response_tokens=2"])
def test_a_cut_distribution_is_taken_where_it_is_corrected_for(setting: str) -> None:
    algorithm = spec_of(None, 2, f"algorithm.{setting}", "algorithm.importance={}").algorithm
    assert isinstance(algorithm, PpoSpec) and algorithm.is_cut
    assert algorithm.importance is not None
    assert (algorithm.importance.level, algorithm.importance.cap) == ("token", 2.0)


@pytest.mark.parametrize(("stop", "texts"), [("x", ("x",)), ("[x, yz]", ("x", "yz")), ("[]", ()), ("'\\n'", ("\\n",))])
def test_one_stop_text_is_a_list_of_one(stop: str, texts: tuple[str, ...]) -> None:
    algorithm = spec_of(None, 2, f"algorithm.stop={stop}").algorithm
    assert isinstance(algorithm, PpoSpec) and algorithm.stop == texts and not algorithm.is_cut


def test_a_short_yaml_keeps_a_penalty_that_is_a_default_of_penalties_but_not_of_the_algorithm(tmp_path: Path) -> None:
    overrides = ("algorithm={name: grpo, kl: {place: loss, estimator: k1}}",)
    spec = spec_of(None, 2, *overrides)
    (tmp_path / "short.yaml").write_text(spec.dump(short=True))
    assert load_spec(tmp_path / "short.yaml") == spec


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (("steps=five",), "--set steps=five: steps: expected a whole number"),
        (("step=5",), "--set step=5: unknown key 'step'"),
        (("models.actor.optimiser.name=sgd",), "--set models.actor.optimiser.name=sgd: models.actor: unknown key"),
        (
            ("algorithm.num_mini_batches=9",),
            "--set algorithm.num_mini_batches=9: algorithm: num_mini_batches 9 exceeds",
        ),
        (("steps=5", "seed=-1"), "--set seed=-1: seed: "),
        (("placement=[1,a]",), "a.yaml: placement"),
    ],
)
def test_a_wrong_setting_is_looked_for_where_it_was_written(
    overrides: tuple[str, ...], origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(yaml.safe_dump(PPO))
    with pytest.raises(UserError, match=rf"^{re.escape(origin)}"):
        load_spec("a.yaml", overrides)
