import threading

from chapbook.runtime.llama.turns import Turns


def test_turns_are_handed_on_in_the_order_of_asking():
    turns = Turns()
    order = []

    def ask(name):
        with turns:
            order.append(name)

    with turns:
        threads = []
        for name in range(5):
            thread = threading.Thread(target=ask, args=(name,))
            thread.start()
            while len(turns._waiting) <= name:
                thread.join(0.001)
            threads.append(thread)
        order.append("first")
    for thread in threads:
        thread.join()
    assert order == ["first", 0, 1, 2, 3, 4]


def test_one_thread_in_a_loop_does_not_keep_another_waiting():
    turns = Turns()
    came = threading.Event()
    rounds = []

    def come():
        with turns:
            came.set()

    thread = threading.Thread(target=come)
    with turns:
        thread.start()
        while not turns._waiting:
            thread.join(0.001)
    # The next turn is the other's, however soon this thread asks again.
    with turns:
        rounds.append(came.is_set())
    thread.join()
    assert rounds == [True]


def test_at_most_one_thread_has_the_turn():
    turns = Turns()
    inside = []
    most = []

    def work():
        for _ in range(200):
            with turns:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 800


def test_a_turn_ends_with_an_exception():
    turns = Turns()
    for _ in range(2):
        try:
            with turns:
                raise KeyError
        except KeyError:
            continue
    assert turns._owner is None
