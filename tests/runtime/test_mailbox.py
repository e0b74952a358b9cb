from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.runtime.mailbox import Mailbox


def test_messages_for_a_run_come_out_in_the_order_in_which_they_came_and_only_once() -> None:
    mailbox = Mailbox()
    mailbox.hold(1, op=4, value="a")
    mailbox.hold(1, op=2, value="b")
    mailbox.hold(1, op=4, value=None)
    assert mailbox.take(1) == [(4, "a"), (2, "b"), (4, None)]
    assert mailbox.take(1) == []


def test_runs_do_not_get_each_others_messages() -> None:
    mailbox = Mailbox()
    mailbox.hold(2, op=0, value="second")
    mailbox.hold(1, op=0, value="first")
    assert len(mailbox) == 2
    assert mailbox.take(1) == [(0, "first")]
    assert mailbox.take(3) == []
    assert mailbox.take(2) == [(0, "second")]


def test_the_end_of_a_run_drops_what_is_held_for_it_and_for_all_before_it() -> None:
    mailbox = Mailbox()
    for run in (1, 2, 3):
        mailbox.hold(run, op=0, value=run)
    mailbox.end(2)
    assert len(mailbox) == 1
    assert mailbox.take(3) == [(0, 3)]


def test_a_message_for_a_run_that_is_over_is_dropped() -> None:
    mailbox = Mailbox()
    mailbox.end(2)
    mailbox.hold(1, op=0, value="late")
    mailbox.hold(2, op=0, value="late")
    assert len(mailbox) == 0
    mailbox.hold(3, op=0, value="early")
    assert mailbox.take(3) == [(0, "early")]


def test_an_end_that_is_told_late_changes_nothing() -> None:
    mailbox = Mailbox()
    mailbox.end(5)
    mailbox.hold(6, op=0, value="kept")
    mailbox.end(3)
    mailbox.hold(4, op=0, value="late")
    assert mailbox.take(4) == []
    assert mailbox.take(6) == [(0, "kept")]


def test_a_run_that_is_skipped_gets_nothing_and_the_one_before_it_still_does() -> None:
    mailbox = Mailbox()
    mailbox.hold(2, op=0, value="before it was skipped")
    mailbox.skip(2)
    mailbox.hold(2, op=1, value="after")
    mailbox.hold(1, op=0, value="kept")
    mailbox.hold(3, op=0, value="kept too")
    assert mailbox.take(2) == []
    assert mailbox.take(1) == [(0, "kept")]
    assert mailbox.take(3) == [(0, "kept too")]


def test_a_run_stays_skipped_once_it_is_over() -> None:
    mailbox = Mailbox()
    mailbox.skip(2)
    mailbox.end(2)
    mailbox.hold(2, op=0, value="late")
    assert len(mailbox) == 0


def test_skipping_a_run_that_nothing_came_for_is_fine() -> None:
    mailbox = Mailbox()
    mailbox.skip(7)
    assert len(mailbox) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["hold", "take", "end", "skip"]), st.integers(1, 5))))
def test_a_mailbox_holds_just_what_came_for_runs_that_may_still_begin(
    steps: list[tuple[str, int]],
) -> None:
    """Against a list of messages and a set of runs, whatever is done in whatever order."""
    mailbox = Mailbox()
    held: list[tuple[int, int]] = []
    gone: set[int] = set()
    for number, (verb, run) in enumerate(steps):
        match verb:
            case "hold":
                mailbox.hold(run, op=number, value=None)
                held += [(run, number)] if run not in gone else []
            case "take":
                assert mailbox.take(run) == [(op, None) for r, op in held if r == run]
                held = [(r, op) for r, op in held if r != run]
            case "end":
                mailbox.end(run)
                gone |= set(range(run + 1))
            case "skip":
                mailbox.skip(run)
                gone.add(run)
        held = [(r, op) for r, op in held if r not in gone]
        assert len(mailbox) == len(held)
