"""The Python code on README.md and the pages of the documentation runs.

Each page on one backend. Trainings are cut after two batches.
"""

import keras
import pytest

from tests.skips import only_on
from tests.support import docstrings, pages

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TURNS = ("torch", "jax", "torch", "torch")
PAGES = pages.pages()


def backend_of(name):
    turn = TURNS[list(PAGES).index(name) % len(TURNS)]
    return pages.backend_of(PAGES[name]) or turn


def on_its_backend(name):
    return pytest.param(name, marks=only_on(backend_of(name), because="page"))


class TwoBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch > 0


@pytest.fixture
def short_trainings(monkeypatch):
    fit = keras.Model.fit

    def short_fit(self, *args, callbacks=(), **kwargs):
        callbacks = [*(callbacks or ()), TwoBatches()]
        return fit(self, *args, callbacks=callbacks, **kwargs)

    monkeypatch.setattr(keras.Model, "fit", short_fit)


@pytest.mark.parametrize("name", map(on_its_backend, PAGES))
def test_page_runs(name, short_trainings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = dict(docstrings.AT_HAND)
    code, _ = pages.blocks(PAGES[name])
    for block in code:
        exec(compile(block, name, "exec"), namespace)


def test_what_runs_and_what_does_not():
    page = """
<!-- backend: jax -->
<!-- set-up:
x = 2
-->
```python
y = x + 1
```

- In a list:

    ```python title="cube.py"
    def cube():
        return y**3
    ```

<!-- not run: needs the network -->

```python
download()
```

```bash
make test
```

```python
assert cube() == 27
```
"""
    code, reasons = pages.blocks(page)
    assert reasons == ["needs the network"] and pages.backend_of(page) == "jax"
    assert [block.count("\n") for block in code[1:]] == [7, 14, 28]
    namespace = {}
    for block in code:
        exec(block, namespace)
    assert namespace["y"] == 3
    assert pages.backend_of("# A page") is None
