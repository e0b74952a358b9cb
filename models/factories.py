"""The import path of a factory: how it is written, made from a function, and found again.

Two forms: `package.module:function` and `/absolute/file.py:function`. The path is all that crosses
the bus of a user's code, so it must mean the same function in every process.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from myelin.errors import ModelError

_FILE_MODULE = "myelin_file_"
_HERE = Path(__file__).parent
_IMPORTING = threading.RLock()
_MODEL = (
    "define the factory with `def` at the top level of a module or of a script's file, and pass "
    "its settings as arguments of Model(...)"
)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_FORMS = "'package.module:function' or '/absolute/file.py:function'"


def checked(factory: str) -> str:
    """Return `factory` if it is written as an import path; it need not exist here.

    Raises:
        ModelError: it is written differently; the message says how to.
    """
    place, function = _split(factory)
    if not function.isidentifier():
        raise ModelError(f"factory {factory!r} does not name a function: write {_FORMS}")
    if place.endswith(".py"):
        if not Path(place).is_absolute():
            raise ModelError(
                f"factory {factory!r} names a file by a relative path, which another process may "
                f"not find: write {str(Path(place).resolve())!r} before the colon"
            )
    elif not all(part.isidentifier() for part in place.split(".")):
        raise ModelError(f"factory {factory!r} does not name a module: write {_FORMS}")
    return factory


def path_of(function: Callable[..., object], *, advice: str = _MODEL) -> str:
    """Return the import path of a module-level function.

    A function of the script that is running gets its file's path, or the module's name when the
    script was started with `python -m`.

    Args:
        function: the function.
        advice: what the error should tell to do.

    Raises:
        ModelError: another process could not import it; the message says what to do.
    """
    name = getattr(function, "__qualname__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if name is None or module is None or getattr(module, name, None) is not function:
        raise ModelError(
            f"{function!r} cannot be imported by a worker: lambdas, nested functions, methods and "
            f"partials have no import path; {advice}"
        )
    return f"{_place(module, name, advice)}:{name}"


def find(factory: str) -> Callable[..., object]:
    """Import the function that `factory` names.

    A file is run once per process, under a name of its own, so its `if __name__ == "__main__"` part
    is left out; its folder is appended to `sys.path`, as its neighbours may be imported by it.

    Raises:
        ModelError: the module or the function does not exist, or importing it raised.
    """
    place, name = _split(checked(factory))
    function = getattr(_import(place, factory), name, None)
    if not callable(function):
        what = "no function" if function is None else f"a {type(function).__name__} called"
        raise ModelError(f"{factory!r}: {place} has {what} {name!r}; check the spelling")
    return function  # type: ignore[no-any-return]


def _split(factory: str) -> tuple[str, str]:
    place, _, function = factory.rpartition(":")
    return place, function


def place_of(error: BaseException) -> str:
    """Return " (file:line)" of the last line of a user's own code that led to an error, or "".

    Lines of this room and of Python are none of that, and those of installed libraries only where
    nothing else had a part in it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    places: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        file, installed = frame.filename, frame.filename.startswith(_INSTALLED)
        if file.startswith("<frozen") or Path(file).parent == _HERE:
            continue
        if installed or not file.startswith(_STANDARD):
            places.insert(0 if installed else len(places), f" ({file}:{frame.lineno})")
    return places[-1] if places else ""


def _place(module: ModuleType, name: str, advice: str) -> str:
    if module.__name__ != "__main__" and not module.__name__.startswith(_FILE_MODULE):
        return module.__name__
    spec = module.__spec__
    if module.__name__ == "__main__" and spec is not None:
        return spec.name
    file = str(getattr(module, "__file__", None) or "")
    if file.endswith(".py"):
        return str(Path(file).resolve())
    where = f"in {file}, whose name does not end with .py"
    if not file:
        where = "in an interactive session"
    elif file.startswith("<"):
        where = "in a script that was read from standard input"
    raise ModelError(
        f"{name} was defined {where}, which cannot be imported by a worker: it must be in a file "
        f"with a name such as my_model.py; {advice}"
    )


def _import(place: str, factory: str) -> ModuleType:
    try:
        return (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{factory!r}: importing {place} raised {type(error).__name__}: {error}"
            f"{place_of(error)}; the module must be importable in every worker, and a script must "
            'do its work under `if __name__ == "__main__":`'
        ) from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = _module_name(path)
    with _IMPORTING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _module_name(path: Path) -> str:
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    return f"{_FILE_MODULE}{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{digest}"
