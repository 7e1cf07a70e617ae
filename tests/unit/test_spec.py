"""The YAML schema: refusals and their sentences, exact numbers, and the way back to YAML."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from small_runs import PPO, spec_of

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementEntry, PlacementMap
from flexrlhf.config.ratio_vector import vector_of_option
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import SpecFile, load_spec
from flexrlhf.config.yaml_io import read_yaml, write_yaml
from flexrlhf.errors import UserError, nearest

SIX = ("actor.shadow", "critic.shadow", "actor", "critic", "ref", "reward")


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        spec_of(None, 2, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump(PPO | changes))
    return path


# --- unknown keys


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("step=3", "step", "steps"),
        ("data.pth=x", "pth", "path"),
        ("models.actr.path=x", "actr", "actor"),
        ("models.actor.optimiser={learning_rate: 1}", "optimiser", "optimizer"),
        ("models.actor.optimizer.learning_rat=1", "learning_rat", "learning_rate"),
        ("algorithm.num_minibatches=2", "num_minibatches", "num_mini_batches"),
        ("algorithm.gama=2", "gama", "gamma"),
        ("algorithm.truncation={penalti: 2}", "penalti", "penalty"),
        ("cluster.nodes=[{devices: 2, clas: V100}]", "clas", "class"),
        ("placement={actor: 1, critic: 1, reward: 1, ref: {ratioo: 1}}", "ratioo", "ratio"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, key: str, meant: str) -> None:
    message = refused(override)
    assert f"unknown key {key!r}" in message
    assert f"did you mean {meant!r}?" in message


def test_the_message_names_the_section_of_an_unknown_key() -> None:
    assert "models.actor.optimizer: unknown key" in refused("models.actor.optimizer.lr=1")
    assert "algorithm: unknown key" in refused("algorithm.beta=1")


def test_an_unknown_key_far_from_all_known_ones_gets_the_list() -> None:
    message = refused("schedule.zzz=1")
    assert "did you mean" not in message
    assert all(known in message for known in ("lag", "num_chunks", "strategy"))


# --- values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=0", ("steps", "1", "found 0")),
        ("algorithm.temperature=0", ("algorithm.temperature", "greater than 0", "found 0")),
        ("algorithm.gamma=1.5", ("algorithm.gamma", "1.5")),
        ("algorithm.name=pppo", ("algorithm", "pppo", "ppo")),
        ("algorithm.whiten=rank", ("algorithm.whiten", "batch", "mini_batch", "'rank'")),
        ("algorithm.num_mini_batches=9", ("num_mini_batches 9", "prompts_per_step 8", "at most 8")),
        ("algorithm.truncation=cut", ("algorithm.truncation:", "'none'", "'bootstrap'", "'cut'")),
        ("algorithm.truncation=penalty", ("algorithm.truncation:", "such as {penalty: 1.0}, found 'penalty'")),
        ("schedule.lag=17", ("schedule.lag", "16", "found 17")),
        ("schedule.strategy=interleaved", ("schedule.strategy", "'interleaving'", "'interleaved'")),
        ("cluster.nodes=[{devices: 1}, {devices: 2}]", ("cluster", "devices 2", "hold 3", "remove")),
        ("models.actor.path=x", ("models.actor", "path", "init", "remove")),
        ("name=a/b", ("name", "a/b")),
        ("placement=half", ("placement", "vector", "[1,1,0.5,0.5]", "'half'")),
        ("placement=[1,1,half,1]", ("placement.2", "0.5", "'half'")),
        ("placement=[1,1,true,1]", ("placement.2", "0.5", "found true")),
        ("placement=[1,1,1/0,1]", ("placement.2", "0.5", "'1/0'")),
        ("placement={actor: 1, ref: {ratio: 1, ranks: [0]}}", ("placement.ref", "ratio", "ranks")),
        ("placement={actor: 1, ref: {ranks: [0, 0]}}", ("placement.ref", "distinct", "[0, 0]")),
        ("placement={actor: 1, ref: {ranks: [-1]}}", ("placement.ref", "negative", "[-1]")),
        ("placement={actor: 1, ref: {ratio: 1, row_shares: [0, 0]}}", ("placement.ref", "row_shares", "0")),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_what_was_found(override: str, words: tuple[str, ...]) -> None:
    message = refused(override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps=many", "steps: expected a whole number, found 'many'"),
        ("steps=1.5", "steps: expected a whole number, found 1.5"),
        ("steps=null", "steps: expected a whole number, found null"),
        # texts that pydantic would read as a number or a truth value; true and 1 are no substitutes of each other
        ("steps=1_000", "steps: expected a whole number, found '1_000'"),
        ("cluster.memory_gb='8'", "cluster.memory_gb: expected a number, found '8'"),
        (
            "models.actor.optimizer.betas=[0.9, '0.95']",
            "models.actor.optimizer.betas.1: expected a number, found '0.95'",
        ),
        ("placement={actor: 1, ref: {ranks: [true]}}", "placement.ref.ranks.0: expected a whole number, found true"),
        ("placement={actor: 1, span_classes: yes}", "placement.span_classes: expected true or false, found 'yes'"),
        ("algorithm.epochs=true", "algorithm.epochs: expected a whole number, found true"),
        ("algorithm.gamma=false", "algorithm.gamma: expected a number, found false"),
        ("sync.checksum=yes", "sync.checksum: expected true or false, found 'yes'"),
        ("sync.checksum=1", "sync.checksum: expected true or false, found 1"),
        ("sync.overlap=1", "sync.overlap: expected auto, true or false, found 1"),
        ("sync.overlap=Y", "sync.overlap: expected auto, true or false, found 'Y'"),
        ("algorithm.temperature=warm", "algorithm.temperature: expected a number, found 'warm'"),
        ("sync.checksum=maybe", "sync.checksum: expected true or false, found 'maybe'"),
        ("data.path=3", "data.path: expected a text, found 3"),
        ("data.path=''", "data.path: expected a path or a name, found ''"),
        ("loggers={}", "loggers: expected a list such as [{name: tensorboard}], found {}"),
        ("eval={}", "eval.path: missing"),
        ("models=3", "models: expected a mapping, found 3"),
        ("models.actor=x", "models.actor: expected a mapping, found 'x'"),
        ("models.actor.init=[1]", "models.actor.init: expected a mapping, found [1]"),
        ("cluster.nodes=3", "cluster.nodes: expected a list such as [{devices: 8}], found 3"),
        ("cluster.nodes=[{devices: x}]", "cluster.nodes.0.devices: expected a whole number, found 'x'"),
        ("cluster.device=gpu", "cluster.device: expected one of 'auto', 'cpu' or 'cuda', found 'gpu'"),
        (
            "algorithm.whiten=minibatch",
            "algorithm.whiten: expected one of 'batch', 'mini_batch' or 'none' (did you mean 'mini_batch'?), "
            "found 'minibatch'",
        ),
        ("algorithm=ppo", "algorithm: expected a mapping such as {name: ppo}, found 'ppo'"),
        ("algorithm=sft", "algorithm: expected a mapping such as {name: sft}, found 'sft'"),
        ("algorithm={}", f"algorithm.name: missing; known: {', '.join(ALGORITHMS)}"),
        ("algorithm.truncation={penalty: x}", "algorithm.truncation.penalty: expected a number, found 'x'"),
        ("algorithm.truncation={}", "algorithm.truncation.penalty: missing"),
        ("algorithm.kl=false", "algorithm.kl: expected a mapping ({} for the defaults, null for none), found false"),
        ("placement={actor: 1, ref: {ranks: 3}}", "placement.ref.ranks: expected a list such as [0, 1], found 3"),
        ("placement={actor: 1, Ref: {ranks: [x]}}", "placement.Ref.ranks.0: expected a whole number, found 'x'"),
        ("placement={1: 1}", "placement.1: expected a text, found 1"),
        (
            "placement={actor: 1, span_clases: true}",
            "placement: span_clases: expected a ratio, found true (did you mean 'span_classes'?)",
        ),
    ],
)
def test_a_wrong_kind_of_value_is_refused_in_plain_words(override: str, sentence: str) -> None:
    assert refused(override) == f"config: {sentence}"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("reward=[]", "reward: expected at least one source: model, function, url or rule, found []"),
        ("reward={}", "reward.0: expected a mapping with model, function, url or rule, found {}"),
        ("reward=[{rule: gsm8k}, 3]", "reward.1: expected a mapping with model, function, url or rule, found 3"),
        (
            "cost={functon: a.py:f}",
            "cost.0: expected a mapping with model, function, url or rule (did you mean 'function'?), "
            'found {"functon": "a.py:f"}',
        ),
        ("reward=[{model: reward, weight: x}]", "reward.0.weight: expected a number, found 'x'"),
        ("reward={model: 3}", "reward.0.model: expected a text, found 3"),
        ("reward={function: a.py:f, workers: 0}", "reward.0.workers: must be greater than or equal to 1, found 0"),
        ("cost={function: a.py:f, wokers: 1}", "cost.0: unknown key 'wokers' (did you mean 'workers'?)"),
        ("reward={url: [3]}", "reward.0.url.0: expected a text, found 3"),
        ("reward={url: []}", "reward.0: url must name at least one service"),
        ("reward={url: 'ftp://a'}", "reward.0: url must start with http:// or https://, found 'ftp://a'"),
        (
            "reward={rule: gsm8}",
            "reward.0.rule: expected one of 'exact_answer', 'gsm8k', 'math', 'reasoning-gym', 'format' or 'length' "
            "(did you mean 'gsm8k'?), found 'gsm8'",
        ),
        ("reward={rule: gsm8k, level: token}", "reward.0.level: expected 'answer', found 'token'"),
        ("reward={rule: format}", "reward.0: rule format needs pattern"),
        ("reward={rule: gsm8k, target_tokens: 3}", "reward.0: rule gsm8k has no target_tokens"),
    ],
)
def test_a_source_of_scores_that_cannot_be_is_refused_in_plain_words(override: str, sentence: str) -> None:
    assert refused(override) == f"config: {sentence}"


BETAS = "models.actor.optimizer.betas"


@pytest.mark.parametrize("value", ["[0.9]", "[0.9, 0.9, 0.9]", "0.9"])
def test_betas_are_two_numbers(value: str) -> None:
    assert f"{BETAS}: expected two numbers such as [0.9, 0.95], found {value}" in refused(f"{BETAS}={value}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{BETAS}=[0.9, 1]", f"{BETAS}.1: must be less than 1"),
        (f"{BETAS}=[-0.1, 0.9]", f"{BETAS}.0: must be greater than or equal to 0"),
        ("models.actor.optimizer.learning_rate=.inf", "models.actor.optimizer.learning_rate: expected a finite number"),
        ("algorithm.clip_high=.nan", "algorithm.clip_high: expected a finite number"),
        ("seed=-1", "seed: must be greater than or equal to 0"),
        (f"seed={2**63}", "seed: must be less than"),
        ("sync.bucket_mb=0.0001", "sync.bucket_mb: must be greater than or equal to 0.001"),
        ("timeout_seconds=0.5", "timeout_seconds: must be greater than or equal to 1"),
        ("models.actor.generate_tokens=0", "models.actor.generate_tokens: must be greater than or equal to 1"),
        # bounds of the fields that a shadow, an operator and an evaluation take from others
        ("models.actor.shadow.tp=0", "models.actor.shadow.tp: must be greater than or equal to 1"),
        ("placement={operators: {generate: {ratio: 1, cp: 0}}}", "generate.cp: must be greater than or equal to 1"),
        ("eval={path: x, template: prompt}", "eval.template: no field such as {question}"),
    ],
)
def test_what_the_ranks_could_not_use_is_refused(override: str, key: str) -> None:
    assert key in refused(override)


def test_the_largest_values_are_taken() -> None:
    spec = spec_of(None, 2, f"seed={2**63 - 1}", f"{BETAS}=[0, 0.999]", "timeout_seconds=1", "sync.bucket_mb=0.001")
    assert spec.seed == 2**63 - 1
    assert spec.models.actor is not None
    assert spec.models.actor.optimizer.betas == (0, 0.999)


@pytest.mark.parametrize("key", ["name", "algorithm", "models", "data"])
def test_a_required_key_is_named_when_missing(key: str) -> None:
    with pytest.raises(UserError, match=key):
        Spec.parse({name: value for name, value in PPO.items() if name != key})


def test_other_chunks_are_refused_with_those_that_divide() -> None:
    message = refused("algorithm.num_mini_batches=6", "schedule.num_chunks=4")
    assert "schedule.num_chunks 4" in message
    assert "algorithm.num_mini_batches 6" in message
    assert "use 1, 2, 3 or 6" in message


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

OPTIMIZER = "models.actor.optimizer"


def model_of(*overrides: str) -> ModelSpec:
    model = spec_of(None, 2, *overrides).models.actor
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            f"{OPTIMIZER}.name=adamww",
            f"{OPTIMIZER}.name: expected one of 'adamw', 'adam' or 'sgd' (did you mean 'adamw'?), found 'adamww'",
        ),
        (
            f"{OPTIMIZER}.schedule=cosin",
            f"{OPTIMIZER}.schedule: expected one of 'constant', 'linear' or 'cosine' (did you mean 'cosine'?), "
            "found 'cosin'",
        ),
        (f"{OPTIMIZER}.warmup_steps=-1", f"{OPTIMIZER}.warmup_steps: must be greater than or equal to 0, found -1"),
        ("models.actor.zero=4", "models.actor.zero: expected one of 0, 1, 2 or 3, found 4"),
        ("models.actor.tp=0", "models.actor.tp: must be greater than or equal to 1, found 0"),
        (
            "models.actor.dtype=fp16",
            "models.actor.dtype: expected one of 'float32', 'bfloat16' or 'float16', found 'fp16'",
        ),
        ("models.actor.lora.rank=0", "models.actor.lora.rank: must be greater than or equal to 1, found 0"),
        (
            "models.actor.lora.targets=q_proj",
            "models.actor.lora.targets: expected a list such as [q_proj, v_proj], found 'q_proj'",
        ),
        ("models.actor.config=3", "models.actor.config: expected a mapping, found 3"),
        ("models.actor.shadow.zero=4", "models.actor.shadow.zero: expected one of 0, 1, 2 or 3, found 4"),
        (
            "models.actor.lora.targets=[q_proj, v_proj, q_proj]",
            "models.actor.lora.targets: q_proj is there twice: remove one of them",
        ),
        ("algorithm.steps=3", "algorithm: unknown key 'steps' (did you mean 'steps' at the top?)"),
        ("data.seed=3", "data: unknown key 'seed' (did you mean 'seed' at the top?)"),
        ("data.optimizer={}", "data: unknown key 'optimizer' (did you mean 'models.actor.optimizer'?)"),
        (
            "algorithm.max_response_tokens=3",
            "algorithm: unknown key 'max_response_tokens' (did you mean 'data.max_response_tokens'?)",
        ),
        (
            "data.max_response_tokens=999999999999",
            "data.max_response_tokens: must be less than or equal to 20000000, found 999999999999",
        ),
        (
            "models.actor.shadow.lora={}",
            "models.actor.shadow: unknown key 'lora'; known: cp, dtype, engine, ep, generate_tokens, "
            "micro_batch_tokens, pp, shard, tp, zero",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_plain_words(override: str, sentence: str) -> None:
    assert refused(override) == f"config: {sentence}"


SHADOW = "{engine: deepspeed, zero: 3, dtype: bfloat16, micro_batch_tokens: 7}"


def test_a_shadow_has_the_settings_of_its_role_but_for_its_own() -> None:
    model = model_of(f"models.actor.shadow={SHADOW}", "models.actor.zero=2", "models.actor.logits_mb=3")
    shadow = model.of_shadow
    assert (shadow.engine, shadow.zero, shadow.dtype, shadow.micro_batch_tokens) == ("deepspeed", 3, "bfloat16", 7)
    assert (shadow.tp, shadow.generate_tokens, shadow.logits_mb, shadow.init) == (1, 65536, 3, model.init)
    assert shadow.shadow is None
    assert (model.engine, model.zero, model.dtype) == ("torch", 2, "float32")


def test_a_preset_of_an_algorithm_without_a_name_is_refused() -> None:
    assert "algorithm" in refused("algorithm={name: {a: rloo}, like: verl}")


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


def test_the_form_of_our_own_code_is_not_open_to_users() -> None:
    assert "placement.models: unknown key 'actor'" in refused("placement={models: {actor: 1}, trane: 3}")
    assert "placement.models: give either ratio or ranks" in refused("placement={models: {}, trane: 3}")
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


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("rollout.engine=transformers", "rollout.tp=2"),
            "rollout: tp goes with engine torch or vllm; transformers generates with the settings of models.actor: "
            "remove tp",
        ),
        (
            ("rollout={engine: transformers, kv_tokens: 64, sleep: false}",),
            "rollout: kv_tokens goes with engine torch or vllm; transformers generates with the settings of "
            "models.actor: remove kv_tokens, sleep",
        ),
        (
            ("rollout.engine=vlm",),
            "rollout.engine: expected one of 'auto', 'transformers', 'torch' or 'vllm', found 'vlm'",
        ),
        (
            ("rollout.dp=2",),
            "rollout: unknown key 'dp'; known: adapters, caches, config, cuda_graphs, dtype, engine, groups, "
            "kv_tokens, late_replies, logprobs, max_restarts, max_segments, noise, order, parity, pp, process, "
            "segment_tokens, sleep, special_tokens, tp",
        ),
        (
            ("rollout.engine=torch", "rollout.pp=2"),
            "rollout: pp goes with engine vllm; torch generates with the settings of models.actor: remove pp",
        ),
        (("rollout.kv_tokens=0",), "rollout.kv_tokens: must be greater than or equal to 1, found 0"),
        (("rollout.process=thread",), "rollout.process: expected 'inline' or 'child', found 'thread'"),
        (
            ("rollout.max_restarts=0",),
            "rollout: max_restarts 0 is of a child process: give process: child, or remove it; an engine in its "
            "rank's own process ends with the rank",
        ),
        (("rollout.noise=off",), "rollout.noise: expected 'exact' or 'engine', found 'off'"),
        (("rollout.parity.every=0",), "rollout.parity.every: must be greater than or equal to 1, found 0"),
        (("rollout.parity.max_difference=0",), "rollout.parity.max_difference: must be greater than 0, found 0"),
        (("rollout.config=3",), "rollout.config: expected a mapping, found 3"),
        *(
            (
                (f"algorithm.{name}={value}",),
                f"algorithm: {name} {value} samples from another distribution than the policy's; use {plain}, "
                "or correct for it with importance: {}",
            )
            for name, value, plain in (("top_p", 0.9, 1), ("top_k", 5, 0), ("min_response_tokens", 2, 0))
        ),
        (("algorithm.top_p=0",), "algorithm.top_p: must be greater than 0, found 0"),
        (("algorithm.top_p=1.5",), "algorithm.top_p: must be less than or equal to 1, found 1.5"),
        (("algorithm.importance.cap=0.5",), "algorithm.importance.cap: must be greater than or equal to 1, found 0.5"),
        (
            ("algorithm.importance.level=tokens",),
            "algorithm.importance.level: expected one of 'token', 'sequence' or 'none' (did you mean 'token'?), found "
            "'tokens'",
        ),
        (
            ("algorithm.importance.max_staleness=0", "schedule.lag=1"),
            "algorithm.importance.max_staleness 0 is below schedule.lag 1, so no token would be trained on from step 1 "
            "on: use at least 1, or schedule.lag 0",
        ),
        (
            ("algorithm.importance.most=2",),
            "algorithm.importance: unknown key 'most'; known: cap, floor, level, max_staleness, outside, reject",
        ),
    ],
)
def test_a_rollout_that_cannot_be_is_refused_in_plain_words(overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(*overrides) == f"config: {sentence}"


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


@pytest.mark.parametrize("stop", ["''", "[x, '']", "3"])
def test_a_stop_text_has_letters(stop: str) -> None:
    assert refused(f"algorithm.stop={stop}").startswith("config: algorithm.stop")


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
