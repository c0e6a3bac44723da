"""What a person who runs a system may ask of it and do to it. Every surface renders this, and decides nothing itself.

    queues.py   how much waits where             letters.py   what lies set aside, and why
    filters.py  which of it, in words            replays.py   putting it back
    outbox.py   what an outbox could not publish, released or given up
    making.py   what came of a topology that was made half-way
    doctor.py   what a URL can do, and what is wrong with it
    abilities.py  what a transport can do, in words
    words.py    numbers as a sentence has them

Nothing here keeps a copy of a state: each number is asked of the broker or the store that owns it.
"""
