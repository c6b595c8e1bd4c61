"""All seconds that the harness waits by, the shortest first: nowhere else is a number of them."""

#: What no event tells is looked at again so soon: a stack that is being written, a rank just before it is given up.
LOOK_AGAIN_S = 0.01
#: What may wait is looked at so often: whether processors are idle, what a rank does that others wait for elsewhere.
LOOK_S = 0.05
#: A wait goes on at most so long before the clock is looked at; who must show that it is there does so that often.
TURN_S = 0.25
#: How long the other ranks may go on after one has died. gloo raises at once when a connection breaks; a rank that
#: takes longer would wait for ever.
DEATH_GRACE_S = 0.3
#: A thread that is woken later than this could not listen, nor could others go on: the machine stood still. A busy one
#: wakes who sleeps much sooner.
LATE_S = 0.5
#: How long the other ranks may go on after one has raised. Its process lives, so the others get no error from the
#: backend; on a busy machine they may be about to raise the same exception.
RAISE_GRACE_S = 1.0
#: How long takes, where there is a processor for it, what takes milliseconds: to write a stack, to end.
MOMENT_S = 1.0
#: So long another scenario waits for those that run, however busy the processors are.
PATIENCE_S = 2.0
#: How much later than the deadline an agent may answer: it asks what others know, and makes its rank write a stack.
MARGIN_S = 3.0
#: A subject that hangs again and again gets this deadline; a zygote as much to end its ranks.
SHORT_DEADLINE_S = 5.0
#: Who is connected, and sends or reads nothing for so long though it should, is lost: it has ended, its host is down or
#: the link to it is cut. So long a zygote may take to report a death.
LOST_S = 10.0
#: How long lanes may take to end their ranks once they are told to stop.
END_TIMEOUT_S = 20.0
#: Connecting the ranks takes tens of milliseconds, but the first use of a GPU may take many seconds.
CONNECT_TIMEOUT_S = 60.0
#: How long the import of a subject or a backend may take, which may compile.
IMPORT_TIMEOUT_S = 120.0
#: Importing torch takes seconds, and many times that when several controllers start at once on a busy machine; a
#: cluster may start processes minutes apart.
START_TIMEOUT_S = 300.0
#: How long who has joined waits for the others: they have to join, and then to import torch for their ranks; who takes
#: longer ends, and its connection with it, so that only a cut link takes all this time.
JOIN_TIMEOUT_S = 2 * START_TIMEOUT_S + CONNECT_TIMEOUT_S
