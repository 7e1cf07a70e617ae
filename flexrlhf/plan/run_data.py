"""Data of a run: its files, and how the rows of each are read; its examples as ranks load them; before, the inspection
and the lengths of files that exist."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrlhf.config.data_settings import DataSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.examples import DataCounts, Example, LoadedExamples, TokenLimits
from flexrlhf.data.files import Row, absence, is_present
from flexrlhf.data.inspection import Inspection
from flexrlhf.data.order import SourceShare
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_example import TextExample
from flexrlhf.data.text_rows import TextRows
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError, one_line, shown
from flexrlhf.operators.graph import Needs
from flexrlhf.plan.run_tokenizer import (
    end_tokens,
    load_tokenizer,
)
from flexrlhf.plan.tokenizers import tokenizer_of, tokenizer_source

if TYPE_CHECKING:
    from flexrlhf.plan.plan import Plan

PLANNED_ROWS = 2000
"""Most rows of a file that planning counts."""
TRIED = 200
"""Solutions of a file that are tried: formulas take milliseconds each."""


@dataclass(frozen=True)
class DataSource:
    """A data file.

    key:          section of the YAML that names it
    path:         the file
    form:         form of its rows, or ``auto``
    needs:        responses that each row must have
    layout:       settings by which its rows are read
    is_training:  whether it has training rows
    parts:        its share of the training prompts, in parts of the sum over the files
    """

    key: str
    path: str
    form: str
    needs: Needs
    layout: RowLayout = RowLayout()
    is_training: bool = False
    parts: int = 1

    @property
    def setting(self) -> str:
        """Setting that names the file."""
        return f"{self.key}.path"

    @property
    def absent_line(self) -> str:
        """Reason why the rows of a file that planning does not find are not checked."""
        return one_line(f"{self.key}: {self.path} {absence(self.path)}")

    def check(self, found: Inspection) -> None:
        """Raise UserError for a file with which ``run`` would stop: bad rows, or prompts over the limit that is one."""
        counts, limits = found.counts, found.counts.limits
        if counts.bad and (limits.bad_rows == "error" or not counts.prompts):
            first, sentence = next(iter(counts.bad.items()))
            raise UserError(f"{self.path}, row {first}: {sentence}{counts.further_bad}")
        if counts.num_long and (
            limits.long_prompts == "error" or limits.drops and counts.num_long == len(counts.prompts)
        ):
            raise UserError(
                f"{self.path}: {counts.num_long} of {len(counts.prompts)} prompts have more than "
                f"data.max_prompt_tokens={limits.max_prompt} tokens, the longest {max(counts.prompts)}: set "
                f"data.long_prompts=drop or a larger data.max_prompt_tokens"
            )


@dataclass(frozen=True)
class DataFiles:
    """Data files of the run of ``plan``."""

    plan: Plan

    @property
    def sources(self) -> list[DataSource]:
        """Training files, and the files of evaluation rows and pretraining texts, if there are any."""
        spec, needs = self.plan.spec, self.plan.graph.data
        sources = training_sources(spec, needs)
        if spec.eval is not None:
            rows = spec.data.for_rows(spec.eval)
            sources.append(DataSource("eval", spec.eval.path, rows.form, needs, _layout(rows, spec)))
        ptx = spec.algorithm.ptx
        if ptx is not None:
            sources.append(DataSource("algorithm.ptx", ptx.path, ptx.form, "responses", RowLayout(ptx.columns)))
        return sources

    def load(self) -> RunData:
        """Load the examples for training and for evaluation."""
        tokenizer = self.plan.tokenizer.load()
        sources = self.sources
        found = {
            each.key: self._loaded(each, tokenizer, self._token_limits, with_columns=self._reads_columns(each))
            for each in sources
        }
        loaded, counts = {key: each.examples for key, each in found.items()}, {key: found[key].counts for key in found}
        training = [source for source in sources if source.is_training]
        examples = [example for source in training for example in loaded[source.key]]
        shares = tuple(SourceShare(len(loaded[source.key]), source.parts) for source in training)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        evaluation, texts = (loaded.get(key, []) for key in ("eval", "algorithm.ptx"))
        ends = self.row_format(tokenizer).ends
        is_trusted, num_ids = self.plan.tokenizer.is_trusted, max(tokenizer.get_vocab().values(), default=-1) + 1
        return RunData(
            examples, evaluation, texts, self.plan.tokenizer.path, ends, pad, is_trusted, shares, counts, num_ids
        )

    def examples(self, name: str, rows: Sequence[str | Row], tokenizer: Any) -> list[Example]:
        """Return the examples of ``rows`` of a program's, called ``name``: texts of prompts, or rows as the training
        data have them. Raises UserError for one that cannot be used, or is too long and not to be truncated."""
        source = next(each for each in self.sources if each.is_training)
        if all(isinstance(row, str) for row in rows):
            source = replace(source, form="auto", layout=replace(source.layout, columns={}, template=None))
        made = [{"prompt": row} if isinstance(row, str) else row for row in rows]
        limits = self._token_limits
        limits = replace(limits, long_prompts="error" if limits.drops else limits.long_prompts, bad_rows="error")
        named, with_columns = replace(source, path=name), self._reads_columns(source)
        return self._loaded(named, tokenizer, limits, with_columns=with_columns, rows=made).examples

    def texts(self, source: DataSource) -> list[TextExample]:
        """Return the rows of a file that can be read, as texts."""
        return TextRows.usable(
            source.path,
            form=source.form,
            needs=source.needs,
            layout=source.layout,
            bad_rows=self.plan.spec.data.bad_rows,
        )

    def solution_lines(self, source: DataSource) -> Iterator[str]:
        """Yield how many solutions of a file with prompts the rules of its scores cannot read, of some that are
        tried."""
        # ranks read no solutions
        from flexrlhf.rewards.checks import SourceChecks

        if source.needs != "prompts" or source.key == "algorithm.ptx":
            return
        texts = self.texts(source)
        for name, sources in (("reward", self.plan.spec.reward or ()), ("cost", self.plan.spec.cost or ())):
            checks = SourceChecks(sources, name)
            for setting, tried, unread, first in checks.solutions_read([each.columns for each in texts], TRIED):
                example = f"; the first is {shown(first)}" if unread else ""
                yield one_line(f"{setting}: solutions that the rule cannot read: {unread} of {tried}{example}")

    def _reads_columns(self, source: DataSource) -> bool:
        """Whether operators read the rows of ``source`` as text."""
        reads = any(operator.reads_texts for operator in (*self.plan.graph.operators, *self.plan.graph.evaluation))
        return reads and source.needs == "prompts"

    def row_format(self, tokenizer: Any) -> ChatFormat:
        """Return the chat format of a run's rows, with the tokens that end its responses."""
        chat, policy = (
            self.plan.tokenizer.prompt_format,
            self.plan.model("actor") if "actor" in self.plan.graph.roles else None,
        )
        return replace(chat, ends=end_tokens(tokenizer, chat, policy))

    def _loaded(
        self,
        source: DataSource,
        tokenizer: Any,
        limits: TokenLimits,
        needs: Needs | None = None,
        with_columns: bool = False,
        rows: list[Row] | None = None,
    ) -> LoadedExamples:
        return LoadedExamples.load(
            source.path,
            form=source.form,
            needs=source.needs if needs is None else needs,
            tokenizer=tokenizer,
            max_prompt_tokens=limits.max_prompt,
            max_response_tokens=limits.max_response,
            long_prompts=limits.long_prompts,
            bad_rows=limits.bad_rows,
            with_columns=with_columns,
            layout=source.layout,
            chat=self.row_format(tokenizer),
            rows=rows,
        )

    def text_encoder(self, role: str) -> TextEncoder:
        """Return the encoder for a role with a tokenizer of its own."""
        model = self.plan.model(role)
        directory = tokenizer_of(role, model)
        assert directory is not None, "planning refuses a role without a tokenizer"
        tokenizer = load_tokenizer(str(directory), model.trust_remote_code, f"models.{role}.retokenize")
        return TextEncoder(
            f"models.{role}.retokenize",
            tokenizer,
            self.plan.lengths.of_role(role).total,
            self.plan.spec.data.control_tokens,
        )

    def turn_tokens(self, tokenizer: Any) -> TurnTokens:
        """Return the encoder of what environments say, for the tokenizer of the run."""
        environment = self.plan.spec.environment
        assert environment is not None, "a run without an environment has no episodes"
        return TurnTokens(tokenizer, self.plan.tokenizer.prompt_format, environment.bridge, self._token_limits)

    @property
    def _token_limits(self) -> TokenLimits:
        data = self.plan.spec.data
        return TokenLimits(data.max_prompt_tokens, data.max_response_tokens, data.long_prompts, data.bad_rows)

    def inspections(self, earlier: Sequence[Plan]) -> Iterator[tuple[DataSource, Inspection]]:
        """Yield the inspection of a sample of the rows of each file that exists; none before tokenizer and tools do.

        ``earlier``: runs of the same command before this one. Raises UserError for a row that cannot be used, and for
        prompts over the limit where ``run`` would stop.
        """
        sources, owner = [source for source in self.sources if is_present(source.path)], self.tokenizer_run(earlier)
        if not sources or owner is None or not self._has_tools:
            return
        tokenizer = owner.tokenizer.load()
        for source in sources:
            found = self.inspect(source, tokenizer, PLANNED_ROWS)
            source.check(found)
            yield source, found

    def tokenizer_run(self, earlier: Sequence[Plan]) -> Plan | None:
        """Return the run whose tokenizer a run has: its own, or of the earlier one that will write its model; None if
        that does not exist."""
        source = tokenizer_source(self.plan.spec, self.plan.graph)
        if source is None:
            return None
        path = Path(realpath(source[1]))
        for index, other in enumerate(earlier):
            if path in other.outputs:
                return other.data.tokenizer_run(earlier[:index])
        return self.plan if path.is_dir() else None

    def inspect(self, source: DataSource, tokenizer: Any, max_rows: int | None = None) -> Inspection:
        """Inspect the file of ``source``, all of its rows or ``max_rows``. Raises UserError."""
        return Inspection.of(
            source.path,
            form=source.form,
            needs=source.needs,
            layout=source.layout,
            tokenizer=tokenizer,
            chat=self.row_format(tokenizer),
            limits=self._token_limits,
            max_rows=max_rows,
        )

    def response_lengths(self) -> tuple[int, ...]:
        """Return tokens of a sample of responses, end tokens included, at most ``data.max_response_tokens``, sorted.

        From the responses in the run's data file, else in its evaluation file; none if neither has any, or they do not
        exist yet.
        """
        for source in self.sources:
            if source.is_training or source.key == "eval":
                examples = self._sampled(source, with_responses=True)
                if examples:
                    return tuple(sorted(len(example.responses[0]) for example in examples))
        return ()

    def prompt_lengths(self) -> tuple[int, ...]:
        """Return tokens of a sample of the prompts in the run's data files, sorted; none if they do not exist yet."""
        training = [source for source in self.sources if source.is_training]
        examples = [example for source in training for example in self._sampled(source, with_responses=False)]
        return tuple(sorted(len(example.prompt) for example in examples))

    def num_kept(self) -> int | None:
        """Return the number of training examples, of the rows that the limits of the run leave; None if the tokenizer,
        or the code of tools, is not there yet.

        Raises UserError for a file that cannot be used.
        """
        if self.tokenizer_run(()) is None or not self._has_tools:
            return None
        tokenizer, limits = self.plan.tokenizer.load(), self._token_limits
        training = [source for source in self.sources if source.is_training]
        return sum(len(self._loaded(source, tokenizer, limits).examples) for source in training)

    def _sampled(self, source: DataSource, with_responses: bool) -> list[Example]:
        """Return a sample of a file's examples.

        None if the file, the tokenizer or the tools do not exist yet, or where responses are needed and the file has
        none.
        """
        if self.tokenizer_run(()) is None or not is_present(source.path) or not self._has_tools:
            return []
        limits = self._token_limits
        if with_responses and not TextRows.has_responses(source.path, source.form, source.layout, limits.bad_rows):
            return []
        limits = replace(limits, long_prompts="drop" if limits.long_prompts == "error" else limits.long_prompts)
        needs: Needs = "responses" if with_responses else "prompts"
        examples = self._loaded(source, self.plan.tokenizer.load(), limits, needs).examples
        return examples[:: max(1, len(examples) // PLANNED_ROWS)]

    def first_rows(self, number: int) -> list[tuple[Example, str]]:
        """Return the first training rows, each with a text that stands for a turn of the policy: its response in the
        data, else its prompt; none if the data does not exist yet."""
        if self.tokenizer_run(()) is None or not self._has_tools:
            return []
        tokenizer, rows = self.plan.tokenizer.load(), list[tuple[Example, str]]()
        for source in self.sources:
            if source.is_training and is_present(source.path) and len(rows) < number:
                texts = [example.responses[0] for example in self._sampled(source, with_responses=True)]
                examples = self._loaded(source, tokenizer, self._token_limits, "prompts", with_columns=True)
                for place, example in enumerate(examples.examples[: number - len(rows)]):
                    rows.append((example, tokenizer.decode(texts[place] if place < len(texts) else example.prompt)))
        return rows

    @property
    def _has_tools(self) -> bool:
        """Whether the code of the environment, whose tools are in prompts, is on this machine."""
        return self.plan.spec.environment is None or EnvironmentTools(self.plan.spec.environment).has_code


def training_sources(spec: Spec, needs: Needs) -> list[DataSource]:
    """Return the files with training rows. Raises UserError for weights that no whole numbers stand for."""
    data = spec.data
    if data.path is not None:
        return [DataSource("data", data.path, data.form, needs, _layout(data, spec), is_training=True)]
    parts = SourceShare.whole_parts([source.weight for source in data.sources])
    return [
        DataSource(f"data.sources.{index}", each.path, rows.form, needs, _layout(rows, spec), True, part)
        for index, (each, part) in enumerate(zip(data.sources, parts, strict=True))
        for rows in [data.for_rows(each)]
    ]


def _layout(rows: DataSpec, spec: Spec) -> RowLayout:
    return RowLayout(rows.columns, rows.template, rows.system, spec.environment is not None)


@dataclass(frozen=True)
class RunData:
    """Examples of a run and the special tokens of its tokenizer.

    examples:       training rows, source after source
    evaluation:     evaluation rows
    texts:          pretraining texts of ``algorithm.ptx``
    tokenizer:      its directory
    eos_token_ids:  all tokens that end a response; the tokenizer's eos is the first
    pad_token_id:   padding token; the end token where the tokenizer has none
    is_trusted:     whether code in the tokenizer's directory may run
    shares:         parts of the training rows by source, and how often they come
    counts:         lengths of all rows of each source, by its key
    num_ids:        ids up to the largest of the tokenizer
    """

    examples: list[Example]
    evaluation: list[Example]
    texts: list[Example]
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    is_trusted: bool = False
    shares: tuple[SourceShare, ...] = ()
    counts: Mapping[str, DataCounts] = field(default_factory=dict)
    num_ids: int = 0

    @cached_property
    def digest(self) -> str:
        """Digest of the training examples: two data files, tokenizers or templates have different ones."""
        digest = hashlib.sha256()
        for example in (*self.examples, *self.texts):
            for tokens in (example.prompt, *example.responses):
                digest.update(array("q", (len(tokens), *tokens)).tobytes())
            for mask in example.trained:
                digest.update(bytes(mask))
        return digest.hexdigest()
