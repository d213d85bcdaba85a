"""Range checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sparseflow.core import checks
from sparseflow.errors import InputError

CASES: list[tuple[Callable[..., None], list[object], list[object]]] = [
    (partial(checks.check_at_least, 1), [1, 2**70], [0, -1, 1.0, True, "1", None]),
    (checks.check_positive, [1, 1e-300], [0, 0.0, -1.0, float("nan"), float("inf"), True, "1", None]),
    (checks.check_non_negative, [0, 0.0, 2.5], [-1e-9, float("nan"), float("inf"), False, None]),
    (partial(checks.check_between, 0, 1), [0, 1, 0.5], [-0.1, 1.1, float("nan"), True, "0"]),
    (partial(checks.check_one_of, ("a", "b")), ["a", "b"], ["c", None, "ab"]),
]


@pytest.mark.parametrize(("check", "valid", "invalid"), CASES)
def test_check_accepts_valid_and_shows_invalid_values(
    check: Callable[..., None], valid: list[object], invalid: list[object]
) -> None:
    for value in valid:
        check(size=value)
    for value in invalid:
        with pytest.raises(InputError) as caught:
            check(other=valid[0], size=value)
        assert f"`size` (={value!r})" in str(caught.value)
