"""What a researcher runs on the laptop whose session has to outlive pods: ``python counting.py``.

It counts with an actor, without a pause, and says where it is, as a line of JSON, at the start and for each line on
standard input; at its end, once more.
"""

import json
import sys
import threading

import loom

BOUND = 150.0


class Counter(loom.Actor):
    def __init__(self):
        self.n = 0

    @loom.endpoint
    def add(self):
        self.n += 1
        return self.n


class Counting(threading.Thread):
    """Counts until it is told to end."""

    def __init__(self, job):
        super().__init__()
        self._job = job
        self._counter = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}).spawn("counter", Counter)
        self.over = threading.Event()
        self._answers, self._events, self._errors = [], [], []
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        for event in self._job.events():
            self._events.append(event.name)

    def run(self):
        try:
            while not self.over.wait(0.05):
                self._answers.append(self._counter.add.call_one().get(timeout=BOUND))
        except BaseException as error:  # noqa: BLE001 - it is said
            self._errors.append(repr(error))

    def say(self):
        answers = list(self._answers)
        about = {"answers": len(answers), "each_once": answers == list(range(1, len(answers) + 1))}
        about |= {"session": self._job.session, "events": self._events, "errors": self._errors}
        print(json.dumps(about), flush=True)


def main():
    with loom.connect() as job:
        counting = Counting(job)
        counting.start()
        counting.say()
        for _ in sys.stdin:
            counting.say()
        counting.over.set()
        counting.join()
    counting.say()


if __name__ == "__main__":
    main()
