"""The base of the records: settings by name, with defaults and checks."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from keras_softmoe.checks import did_you_mean

record = dataclasses.dataclass(frozen=True, kw_only=True)


@record
class Settings:
    """Base class of records whose fields are the settings of a backbone.

    A field has the name and the default of the argument of the backbone, and a record
    refuses values that do not go together. `backbone` is the name of its class.
    """

    backbone: ClassVar[str]

    def __post_init__(self):
        """Check the values. Subclasses extend it."""

    @classmethod
    def names(cls) -> dict[str, Any]:
        """Return the defaults of all settings, or `dataclasses.MISSING`."""
        found = [(field.name, field.default) for field in dataclasses.fields(cls)]
        # Required settings come first.
        return dict(sorted(found, key=lambda x: x[1] is not dataclasses.MISSING))

    @classmethod
    def of(cls, settings: Mapping) -> Self:
        """Make the record of a dict of settings."""
        accepted = cls.names()
        required = [n for n, x in accepted.items() if x is dataclasses.MISSING]
        missing = [name for name in required if name not in settings]
        unknown = sorted(settings.keys() - accepted.keys())
        if missing or unknown:
            optional = [name for name in accepted if name not in required]
            raise ValueError(
                f"The arguments of `{cls.backbone}` are {', '.join(required)}, and "
                f"optionally {', '.join(optional)}. Received: "
                + (f"also {', '.join(unknown)}" if unknown else "")
                + (f"no {', '.join(missing)}" if missing and not unknown else "")
                + f".{did_you_mean(unknown, accepted)}"
            )
        return cls(**settings)

    @classmethod
    def of_arguments(cls, scope: Mapping) -> Self:
        """Make the record from the `locals()` of a constructor."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: scope[name] for name in names})

    def flat(self) -> dict[str, Any]:
        """Return all settings as a dict, in the order of `names`."""
        return {name: getattr(self, name) for name in self.names()}

    def replace(self, **changes) -> Self:
        """Return a record with other values, checked again."""
        return self.of({**self.flat(), **changes})

    def with_values(self, **values) -> Self:
        """Return a record with other values that are known to be valid."""
        found = copy.copy(self)
        # Past the record, which is frozen
        vars(found).update(values)
        return found
