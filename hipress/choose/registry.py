"""The codecs of a search: plans name them by key, and compiled ones take the places of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from casync.codec import Codec
from hipress.choose import candidates
from hipress.choose.plan import HOSTED, own_codec, too_large, unsuited
from hipress.model.params import Param
from hipress.options import Options

__all__ = ["Registry"]


class Registry(Mapping[str, Codec]):
    """Candidates by key, and their variants for shapes of parameters."""

    def __init__(self, codecs: Mapping[str, Codec], options: Options, target: str = "cpu") -> None:
        """codecs: by key; keys of the host's end with HOSTED, for a device. target: backend of
        compll that `compile` compiles for."""
        self._codecs, self._options, self._target = dict(codecs), options, target
        self._variants: dict[tuple[str, tuple[int, ...]], tuple[str, Codec]] = {}

    def __getitem__(self, key: str) -> Codec:
        return self._codecs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._codecs)

    def __len__(self) -> int:
        return len(self._codecs)

    def only(self, keys: Iterable[str]) -> Registry:
        """A registry of these candidates."""
        chosen = {key: self._codecs[key] for key in dict.fromkeys(keys)}
        return Registry(chosen, self._options, self._target)

    def hosted(self) -> Registry:
        """A registry of the same candidates for the host, with keys of their own."""
        return Registry({key + HOSTED: codec for key, codec in self.items()}, self._options)

    def variant(self, key: str, param: Param) -> tuple[str, Codec]:
        """Key and codec of a candidate for the shape of a parameter."""
        known = self._variants.get((key, param.shape))
        if known is None:
            codec = self._codecs[key]
            name, own = own_codec(codec, param, self._options)
            settled = name.removeprefix(codec.name)
            bare, at = key.removesuffix(HOSTED), HOSTED * key.endswith(HOSTED)
            known = self._variants[key, param.shape] = f"{bare}{settled}{at}", own
        return known

    def every(self, params: Sequence[Param]) -> dict[str, Codec]:
        """The candidates, and their variants for these parameters, by key."""
        variants = [self.variant(key, param) for key in self._codecs for param in params]
        return {**self._codecs, **dict(variants)}

    def refuses(self, key: str, param: Param) -> str | None:
        """The reason why a candidate does not suit this parameter, or None."""
        codec = self.variant(key, param)[1]
        wrong = candidates.refuses(codec, param) or unsuited(param, codec, self._options)
        return wrong or too_large(param, codec, self._options)

    def compile(self, params: Sequence[Param], check: Callable[[], None]) -> dict[str, Codec]:
        """The result of `every`, compiled, for `use_compiled`. check: called before each codec."""
        codecs = {}
        for key in self._codecs:
            check()
            bare = key.removesuffix(HOSTED)
            codecs[key] = candidates.candidates(self._options, self._target, only={bare})[bare]
        compiled = Registry(codecs, self._options, self._target)
        for key in codecs:
            for param in params:
                check()
                compiled.variant(key, param)
        return compiled.every(params)

    def use_compiled(self, compiled: Mapping[str, Codec]) -> None:
        """Replace the candidates by compiled ones; plans made from now on have these."""
        self._codecs = {key: compiled[key] for key in self._codecs}
        self._variants.clear()
