"""Work in the background: jobs in order while the caller goes on, and items made ahead of their use."""

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Does jobs one after another in a thread that lives while there are any.  A job that fails stays first in line.

    One thread hands jobs over.  `finish` does what is left in the calling thread, so that it works at interpreter exit.
    """

    def __init__(self, work: Callable[[T], object], limit: int) -> None:
        self._work, self._limit = work, limit
        self._jobs: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._running = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, job: T, size: int) -> None:
        """Hand over a job of `size` bytes; returns when at most `limit` bytes wait.

        Raises:
            BaseException: What an earlier job raised.  The new one is in line all the same; the next call tries again.
        """
        with self._changed:
            self._jobs.append((job, size))
            self._bytes += size
            if not self._running and self._error is None:
                self._running = True
                threading.Thread(target=self._run, name="attrax store", daemon=True).start()
            self._changed.wait_for(lambda: self._bytes <= self._limit or not self._running)
        self.check()

    def check(self) -> None:
        """Raise what a job raised, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self, job: T | None = None) -> None:
        """Do all jobs, and a last one.

        Raises:
            BaseException: What a job raised; it and those after it are still in line.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            self._error = None
            if job is not None:
                self._jobs.append((job, 0))
        while self._jobs:
            self._first()

    def _first(self) -> None:
        job, size = self._jobs[0]
        self._work(job)
        with self._changed:
            self._jobs.popleft()
            self._bytes -= size
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._more():
                self._first()
        except BaseException as error:
            with self._changed:
                self._error, self._running = error, False
                self._changed.notify_all()

    def _more(self) -> bool:
        with self._changed:
            self._running = bool(self._jobs)
            self._changed.notify_all()
            return self._running


def ahead(items: Generator[T], count: int) -> Generator[T]:
    """The items of a generator, made by a thread up to `count` ahead of the one in use.

    The thread ends with the iteration, however that ends; an error in it is raised in its place among the items.

    >>> list(ahead((n for n in range(5)), 2))
    [0, 1, 2, 3, 4]
    """
    made: deque[T] = deque()
    failed: list[BaseException] = []
    changed = threading.Condition()
    running = True

    def run() -> None:
        nonlocal running
        try:
            for item in items:
                with changed:
                    made.append(item)
                    changed.notify_all()
                    changed.wait_for(lambda: len(made) < count or not running)
                    if not running:
                        break
                del item
        except BaseException as error:
            failed.append(error)
        finally:
            items.close()
            with changed:
                running = False
                changed.notify_all()

    thread = threading.Thread(target=run, name="attrax prefetch", daemon=True)
    thread.start()
    try:
        while True:
            if not thread.is_alive() and running:
                raise RuntimeError(
                    "prefetch: the process was forked while a thread of it reads ahead, which goes on in the first one "
                    "only. Begin to read after the fork, or open the store with prefetch=0."
                )
            with changed:
                changed.wait_for(lambda: made or not running)
                if not made:
                    break
                item = made.popleft()
                changed.notify_all()
            yield item
            del item
        if failed:
            raise failed[0]
    finally:
        if thread.is_alive():
            with changed:
                running = False
                changed.notify_all()
            if thread is not threading.current_thread():  # which may be the one that collects garbage
                thread.join()
