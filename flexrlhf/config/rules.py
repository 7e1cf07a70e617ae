"""Rules as rows: values of a setting, and the values of other subjects that go with them.

One loop asks a table of rules of a view, which has the values of subjects by name. A row names all subjects that it
reads, so that all views with the same values receive the same answer. Refusals have one form of sentence: the value
found, the one that it needs and the nearest that work, the last of them also as data (``SettingError.alternatives``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self

from flexrlhf.errors import Alternative, SettingError, either, plain_value


class RuleView:
    """Values of the subjects of rules: of settings, by name, and of facts, whose names begin with a source and a dot.

    settings:  the mapping that has the settings.
    """

    SOURCES: ClassVar[Mapping[str, tuple[str, type]]] = MappingProxyType({})
    """Source of facts → the attribute of the view that has them, and its class."""
    settings: Any

    @classmethod
    def is_fact(cls, subject: str) -> bool:
        """Return whether a subject is a fact, which no change of settings makes another."""
        return "." in subject and subject.partition(".")[0] in cls.SOURCES

    @classmethod
    def getter(cls, subject: str) -> Callable[[Any], Any]:
        """Return the function that reads a subject of a view."""
        source, _, name = subject.partition(".")
        if cls.is_fact(subject):
            attribute, kind = cls.SOURCES[source]
            known = {*dir(kind), *(each for base in kind.__mro__ for each in getattr(base, "__annotations__", ()))}
            assert name in known and not name.startswith("_"), f"{cls.__name__} has no {subject}"
            return attrgetter(f"{attribute}.{name}")
        cls.default(source)
        return attrgetter(f"settings.{subject}")

    @classmethod
    def default(cls, setting: str) -> object:
        """Return the default of a setting. Raises KeyError for an unknown one."""
        raise NotImplementedError

    def place(self, setting: str) -> tuple[str, str]:
        """Return the section of the YAML and the name there of a setting."""
        raise NotImplementedError

    def engines(self) -> Iterator[tuple[str, ...]]:
        """Yield the engines that may stand instead of the view's, the better ones first."""
        yield from ()

    def offers(self, setting: str, value: object) -> bool:
        """Return whether a value of a setting that a rule allows is named: not if other checks refuse it."""
        return True

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Return the view with other values of settings."""
        raise NotImplementedError


def with_values(settings: Any, changes: Mapping[str, object]) -> Any:
    """Return a section of the YAML with other values by name, such as ``optimizer.name``; they are not checked."""
    for name, value in changes.items():
        own, _, rest = name.partition(".")
        new = with_values(getattr(settings, own), {rest: value}) if rest else value
        settings = settings.model_copy(update={own: new})
    return settings


@dataclass(frozen=True)
class Values:
    """Values of a subject that a rule is about, or allows.

    listed:    the values; nothing where a function returns them.
    excepted:  whether all values but these are meant.
    are_items: whether collections are meant that have all of these.
    function:  returns the values.
    subjects:  whose values it takes.
    """

    listed: tuple[object, ...] = ()
    excepted: bool = False
    are_items: bool = False
    function: Callable[..., Iterable[object]] | None = None
    subjects: tuple[str, ...] = ()

    def those_of(self, get: Callable[[str], Any]) -> tuple[object, ...]:
        """Return the listed values. ``get``: returns the value of a subject."""
        return self.listed if self.function is None else tuple(self.function(*map(get, self.subjects)))

    def have(self, found: object, get: Callable[[str], Any]) -> bool:
        """Return whether ``found`` is meant."""
        listed = self.listed if self.function is None else self.those_of(get)
        if self.are_items:
            return isinstance(found, Collection) and all(item in found for item in listed)
        return (found in listed) is not self.excepted


def but(*values: object) -> Values:
    """Return all values but these."""
    return Values(values, excepted=True)


def with_item(item: object) -> Values:
    """Return the collections that have ``item``."""
    return Values((item,), are_items=True)


def made_by(function: Callable[..., Iterable[object]], *subjects: str) -> Values:
    """Return the values that ``function`` returns for the values of ``subjects``."""
    return Values(function=function, subjects=subjects)


def listed_by(subject: str) -> Values:
    """Return the values that a subject lists."""
    return made_by(tuple, subject)


YES, NO = (True,), (False,)
MOST_FURTHER = 3
"""Settings that may have to change with an engine for it to be named instead."""
Meant = Mapping[str, Values | tuple[object, ...]]
"""Subject → the values of it that are meant."""


@dataclass(frozen=True)
class Rule:
    """Values of a setting that go with some values of other subjects alone.

    setting:  its name.
    needs:    subjects → values of them that go with it; of the setting itself, if others say which of its values fit.
    when:     subjects → values of them without which the rule says nothing; of the setting every value but its default,
              if it is not named.
    lacks:    noun of what an engine that ``needs`` refuses does not have.
    reason:   sentence up to the alternatives instead of the common one, with subjects in braces, ``{found}``, or
              ``{other}``, the name of the subject that refuses it.
    instead:  values of the setting that work; empty: its default.
    words:    instead of these values.
    also:     further settings → values of them that work instead.
    further:  words of alternatives that are no settings.
    """

    setting: str
    needs: Meant
    when: Meant = field(default_factory=dict)
    lacks: str = ""
    reason: str = ""
    instead: tuple[object, ...] = ()
    words: str = ""
    also: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    further: tuple[str, ...] = ()


class RuleTable:
    """Rules of views of one class, in the order in which they are asked."""

    def __init__(self, view: type[RuleView], rules: Iterable[Rule]) -> None:
        self._view, self.rules = view, tuple(rules)
        self._rows = tuple(_Row(rule, view) for rule in self.rules)

    def about(self, *settings: str) -> Self:
        """Return the rules of these settings alone."""
        return type(self)(self._view, (rule for rule in self.rules if rule.setting in settings))

    @property
    def subjects(self) -> frozenset[str]:
        """Names of all subjects that a rule reads."""
        return frozenset(subject for row in self._rows for subject in row.getters)

    def check(self, view: RuleView) -> None:
        """Raise SettingError for the first rule that refuses ``view``."""
        for error in self.refusals(view):
            raise error

    def refusals(self, view: RuleView) -> Iterator[SettingError]:
        """Yield the errors of all rules that refuse ``view``."""
        for row in self._rows:
            if (refused := row.refused(view)) is not None:
                yield row.error(view, refused, partial(self._works, view, row), self._engines(view, row))

    def _engines(self, view: RuleView, row: _Row) -> Iterable[Alternative]:
        """Return other engines with which no rule refuses the view, else the ones that need fewest settings more for
        it; none for a row that does not depend on the engine."""
        if not row.reads_engine:
            return ()
        place = view.place("engine")
        for names in view.engines():
            if found := tuple(name for name in names if self._allows(view.changed({"engine": name}))):
                return (Alternative(*place, found),)
        # by their text, since a setting may be a mapping
        along: dict[str, tuple[tuple[tuple[str, object], ...], list[str]]] = {}
        for name in dict.fromkeys(name for names in view.engines() for name in names):
            if (further := self._further(view.changed({"engine": name}), row)) is not None:
                along.setdefault(repr(further), (further, []))[1].append(name)
        least = min((len(own) for own, _ in along.values()), default=0)
        return [Alternative(*place, tuple(names), along=own) for own, names in along.values() if len(own) == least]

    def _further(self, view: RuleView, row: _Row) -> tuple[tuple[str, object], ...] | None:
        """Return the settings that have to change, too, for a view that ``row`` allows, so that no rule refuses it;
        None if ``MOST_FURTHER`` of them do not suffice."""
        found: dict[str, object] = {}
        while row.refused(view) is None and len(found) <= MOST_FURTHER:
            broken = next(((each, other) for each in self._rows if (other := each.refused(view)) is not None), None)
            if broken is None:
                return tuple(found.items())
            # the setting that is refused stays as it is
            change = broken[0].mended(view, broken[1], row.rule.setting)
            if change is None or change[0] in found:
                return None
            found |= [change]
            view = view.changed(found)
        return None

    def _allows(self, view: RuleView) -> bool:
        return all(row.refused(view) is None for row in self._rows)

    def _works(self, view: RuleView, row: _Row, setting: str, value: object) -> bool:
        """Return whether no rule about the setting of ``row`` refuses the view with another value of a setting, and no
        other rule that allows it now."""
        changed = view.changed({setting: value})
        is_refused = (
            each.refused(changed) is not None and (each.rule.setting == row.rule.setting or each.refused(view) is None)
            for each in self._rows
        )
        return view.offers(setting, value) and not any(is_refused)


class _Row:
    """A rule of a table with functions that read its subjects."""

    def __init__(self, rule: Rule, view: type[RuleView]) -> None:
        self.rule, self._view = rule, view
        meant = ({rule.setting: but(view.default(rule.setting)), **rule.when}, rule.needs)
        self._when, self.needs = ({subject: _values(each) for subject, each in group.items()} for group in meant)
        named = [*self._when, *self.needs, rule.setting]
        read = (subject for each in (*self._when.values(), *self.needs.values()) for subject in each.subjects)
        self.getters = {subject: view.getter(subject) for subject in (*named, *read)}
        self.reads_engine = any(subject.startswith("engine.") for subject in self.getters)
        own = self._when.pop(rule.setting)
        self._found, self._listed, self._excepted = self.getters[rule.setting], own.listed, own.excepted
        self._conditions = tuple((self.getters[subject], values) for subject, values in self._when.items())
        self._needed = tuple((subject, self.getters[subject], values) for subject, values in self.needs.items())
        others = [subject for subject in self.needs if view.is_fact(subject) and not subject.startswith("engine.")]
        assert rule.reason or not others, f"a rule of {rule.setting} gives no reason for {others}"

    def refused(self, view: RuleView) -> str | None:
        """Return the first subject whose value the rule does not allow; None if it allows all."""
        # searches ask many thousand times, mostly of settings at their defaults
        if (self._found(view) in self._listed) is self._excepted:
            return None

        def get(subject: str) -> Any:
            return self.getters[subject](view)

        for getter, values in self._conditions:
            if not values.have(getter(view), get):
                return None
        for subject, getter, values in self._needed:
            if not values.have(getter(view), get):
                return subject
        return None

    def error(
        self, view: RuleView, refused: str, works: Callable[[str, object], bool], engines: Iterable[Alternative]
    ) -> SettingError:
        """Return the error of a view whose value of the subject ``refused`` is not allowed.

        works:    whether a value of a setting mends the refusal, and leads to no other.
        engines:  alternatives by another engine.
        """
        place, own = view.place(self.rule.setting), self._own_alternatives(view, refused, works)
        others = (*self._other_alternatives(view, refused, works), *engines)
        texts = [self.rule.words] if self.rule.words else [each.text_in(*place) for each in own]
        texts += [each.text_in(*place) for each in others]
        if refused in self.needs and self.needs[refused].excepted and not view.is_fact(refused):
            texts.append(f"give {view.place(refused)[1]}")
        texts += [text.format_map(_Words(view, {})) for text in self.rule.further]
        texts = texts or self._partial(view)
        return SettingError.of(*place, "; ".join([self._reason(view, refused), *_instructions(texts)]), (*own, *others))

    def _partial(self, view: RuleView) -> list[str]:
        """Return the engines with which this rule allows a view that other rules refuse with any of them."""
        names = dict.fromkeys(name for names in view.engines() for name in names)
        fitting = [name for name in names if self.refused(view.changed({"engine": name})) is None]
        return [f"engine {either(fitting)} with other settings"] if fitting else []

    def _reason(self, view: RuleView, refused: str) -> str:
        rule, found = self.rule, plain_value(self.getters[self.rule.setting](view))
        if rule.reason:
            return rule.reason.format_map(_Words(view, {"found": found, "other": view.place(refused)[1]}))
        if refused.startswith("engine."):
            lacks = f"no {rule.lacks}, found {rule.setting}" if rule.lacks else "none, found"
            return f"engine {view.settings.engine} has {lacks} {found}"
        value, name = self.getters[refused](view), view.place(refused)[1]
        if self.needs[refused].excepted:
            return f"{found} needs {name}" + ("" if value is None else f", found {plain_value(value)}")
        other = plain_value(value)
        return f"{found} goes with {view.place(refused)[1]} {self._allowed_text(view, refused)}, found {other}"

    def mended(self, view: RuleView, refused: str, kept: str) -> tuple[str, object] | None:
        """Return a setting other than ``kept`` whose change mends a refusal, and its value; None if there is none."""
        setting, is_other = self.rule.setting, refused != self.rule.setting and not view.is_fact(refused)
        if setting not in (kept, "engine"):
            works = self.allowed(view, setting) if refused == setting else self.rule.instead
            return setting, (works or (self._view.default(setting),))[0]
        return (refused, self.allowed(view, refused)[0]) if is_other and refused != kept else None

    def allowed(self, view: RuleView, subject: str) -> tuple[object, ...]:
        """Return the values of a subject that the rule needs."""
        return self.needs[subject].those_of(lambda other: self.getters[other](view))

    def _allowed_text(self, view: RuleView, subject: str) -> str:
        return either(map(plain_value, self.allowed(view, subject)))

    def _own_alternatives(
        self, view: RuleView, refused: str, works: Callable[[str, object], bool]
    ) -> tuple[Alternative, ...]:
        """Return the values of the rule's setting with which it allows the view; nothing, or one alternative."""
        setting, is_other_setting = self.rule.setting, refused != self.rule.setting and not self._view.is_fact(refused)
        if setting == "engine" and not self.rule.instead:
            return ()
        fitting = self.allowed(view, setting) if refused == setting else (self._view.default(setting),)
        fitting = self.rule.instead or fitting
        # another engine is another copy, which these rules do not see
        values = tuple(value for value in fitting if setting == "engine" or works(setting, value))
        # a value that something else refuses here may work with other settings
        is_all = not is_other_setting and values == fitting
        return (Alternative(*view.place(setting), values, is_all),) if values else ()

    def _other_alternatives(
        self, view: RuleView, refused: str, works: Callable[[str, object], bool]
    ) -> Iterator[Alternative]:
        """Yield the values of other settings with which the rule allows the view."""
        others = dict(self.rule.also)
        if refused != self.rule.setting and not self._view.is_fact(refused) and not self.needs[refused].excepted:
            others = {refused: self.allowed(view, refused), **others}
        for other, fitting in others.items():
            if values := tuple(value for value in fitting if works(other, value)):
                yield Alternative(*view.place(other), values)


class _Words(dict[str, object]):
    """Words that a reason may have in braces: a view's attributes with facts, or settings, by name."""

    def __init__(self, view: RuleView, words: Mapping[str, object]) -> None:
        super().__init__(words)
        self._view = view

    def __missing__(self, name: str) -> object:
        sources = {attribute for attribute, _ in self._view.SOURCES.values()}
        return getattr(self._view, name) if name in sources else self._view.getter(name)(self._view)


def _values(meant: Values | tuple[object, ...]) -> Values:
    return meant if isinstance(meant, Values) else Values(meant)


def _instructions(texts: Sequence[str]) -> list[str]:
    """Return alternatives as the end of a sentence; nothing if there is none."""
    if not texts:
        return []
    verb = "" if texts[0].startswith("remove ") else "use "
    *most, last = texts
    return [f"{verb}{', '.join(most)}, or {last}" if most else f"{verb}{last}"]
