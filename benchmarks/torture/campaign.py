"""Cases with limits of time and memory, and the tally of what became of them."""

import collections
import contextlib
import re
import signal
import time
import traceback

SECONDS, MEGABYTES = 10, 1024

# The rule or the remedy of a message. (Some begin a sentence, some do not.)
REMEDY = re.compile(
    r"\b(pass|choose|restore|fetch|remove|make|use|leave|set|load|save|give|see|resize|"
    r"build|raise|lower|call|copy|change|turn|take|compile|feed|pad|put|repeat|convert|"
    r"mend|add|delete|name|train|route|draw|start|accepted|did you mean|must)\b",
    re.IGNORECASE,
)


class TimeLimit(BaseException):
    """A case took too long. Not an `Exception`, which somebody might explain away."""


class Tally:
    """What became of the cases of one part.

    Attributes:
        part: str, what was tortured.
        cases: int, how many there were.
        refusals: counter of the names of errors.
        failures: list of str, of which each is a defect.
        seconds: float, the longest case; megabytes: float, the largest.
    """

    def __init__(self, part):
        self.part = part
        self.cases, self.failures = 0, []
        self.refusals = collections.Counter()
        self.seconds = self.megabytes = 0.0
        self._start = time.monotonic()

    @contextlib.contextmanager
    def case(self, name, mentions=(), any_error=False, seconds=SECONDS):
        """Scope of one case, which has to end well or in a refusal.

        Args:
            name: str, with which it can be repeated.
            mentions: strings that the message of a refusal has to contain.
            any_error: bool, whether errors of other kinds than `ValueError` count as
                refusals: those of Keras' own functions do.
            seconds: float, the limit of time.
        """
        self.cases += 1
        problem = None
        with _limits(seconds) as used:
            try:
                yield
            except ValueError as error:
                problem = _objection(error, mentions, any_error)
                self.refusals[type(error).__name__] += 1
            except (TimeLimit, AssertionError) as error:
                problem = _shown(error)
            except Exception as error:
                if any_error:
                    self.refusals[type(error).__name__] += 1
                else:
                    problem = _shown(error)
        self.seconds = max(self.seconds, used["seconds"])
        self.megabytes = max(self.megabytes, used["megabytes"])
        if used["megabytes"] > MEGABYTES:
            problem = problem or f"took {used['megabytes']:.0f} MB"
        if problem:
            self.failures.append(f"{self.part}: {name}: {problem}")

    def as_dict(self):
        return {
            "cases": self.cases,
            "refusals": dict(sorted(self.refusals.items())),
            "failures": self.failures,
            "longest_case_seconds": round(self.seconds, 2),
            "largest_case_megabytes": round(self.megabytes),
            "seconds": round(time.monotonic() - self._start, 1),
        }


def explanation(error):
    """The message of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _objection(error, mentions, any_error):
    """What is wrong with a refusal, `None` if nothing is."""
    if any_error:
        return None
    text = explanation(error)
    missing = [word for word in mentions if word not in text]
    if missing:
        return f"does not mention {missing}: {text[:300]}"
    if not REMEDY.search(text):
        return f"says no remedy: {text[:300]}"
    if len(text) > 5000:
        return f"says {len(text)} letters: {text[:300]}"
    return None


def _shown(error):
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
    return f"{type(error).__name__} at {place}: {str(error)[:300]}"


@contextlib.contextmanager
def _limits(seconds):
    """Raises `TimeLimit`; yields a dict, in the end with what was used."""

    def stop(signum, frame):
        raise TimeLimit(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start, used, resident = time.monotonic(), {}, _reset_peak()
    try:
        yield used
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        used["seconds"] = time.monotonic() - start
        used["megabytes"] = max(0.0, _memory("VmHWM") - resident)


def _reset_peak():
    """Forget the largest memory of this process so far; returns that of now, in MB."""
    # Not on every system
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _memory("VmRSS")


def _memory(field):
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def resident_megabytes():
    """The memory that this process has now, in MB; 0 where nobody knows.

    Without pages of files, such as libraries: the system drops them when they are cold
    and reads them again, hundreds of MB of them.
    """
    return _memory("RssAnon")
