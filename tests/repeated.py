"""`@repeated("blocking", [True, False])`: cases of a test in one launch of its ranks.

As `pytest.mark.parametrize`, but cases share the launch, which is most of what a small test on
ranks costs. A failure tells its case in a note.
"""

from __future__ import annotations

import inspect


def repeated(names, cases):
    """Call the test once for each case: a value of the argument, or a tuple of several."""
    several = not isinstance(names, str)

    def decorate(test):
        def run(**given):
            for case in cases:
                now = dict(zip(names, case, strict=True)) if several else {names: case}
                try:
                    test(**given, **now)
                except Exception as error:
                    error.add_note(f"case: {now}")
                    raise

        parameters = inspect.signature(test).parameters.values()
        drawn = names if several else (names,)
        run.__signature__ = inspect.Signature([p for p in parameters if p.name not in drawn])
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.pytestmark = getattr(test, "pytestmark", [])
        return run

    return decorate
