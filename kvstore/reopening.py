"""Opening a namespace again that the store has retired, so that whoever was idle for long notices nothing."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvstore.errors import NamespaceUnknown
from kvstore.namespace import Namespace

REMEMBERED = 4096  # namespaces of one caller: trainers open one a step


class Opened:
    """The namespaces that a caller has opened lately, by digest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces: OrderedDict[bytes, Namespace] = OrderedDict()

    def note(self, digest: bytes, namespace: Namespace) -> None:
        """It was opened."""
        with self._lock:
            self._namespaces[digest] = namespace
            self._namespaces.move_to_end(digest)
            if len(self._namespaces) > REMEMBERED:
                self._namespaces.popitem(last=False)

    def find(self, digest: bytes) -> Namespace | None:
        """The namespace of a digest, if it is remembered."""
        with self._lock:
            return self._namespaces.get(digest)


class Opener(Protocol):
    """Who opens namespaces, and remembers them."""

    @property
    def opened(self) -> Opened: ...

    def open_namespace(self, namespace: Namespace) -> bytes:
        """See ``kvstore.api.KVStore``."""


Verb = TypeVar("Verb", bound=Callable[..., Any])


def reopening(verb: Verb) -> Verb:
    """A verb that opens its namespace again, once, when the store does not know it any more.

    A store with another data directory gives another digest; then the namespace stays unknown.
    """

    @functools.wraps(verb)
    def call(face: Opener, namespace: bytes, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(face, namespace, *args, **kwargs)
        except NamespaceUnknown:
            known = face.opened.find(namespace)
            if known is None or face.open_namespace(known) != namespace:
                raise
        return verb(face, namespace, *args, **kwargs)

    return cast(Verb, call)
