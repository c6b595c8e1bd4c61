"""All seconds that the harness waits by, the shortest first: nowhere else is a number of them."""

#: How often to poll where no event reports: a stack that is being written, a rank just before it is given up.
LOOK_AGAIN_S = 0.01
#: How often to poll what is not urgent: whether processors are idle, what a rank does that remote ranks wait for.
LOOK_S = 0.05
#: A wait reads the clock at least so often, and a process that must show that it lives sends that often.
TURN_S = 0.25
#: How long the other ranks may go on after one has died. gloo raises at once when a connection breaks; a rank that
#: takes longer would wait for ever.
DEATH_GRACE_S = 0.3
#: If a sleeping thread is woken later than this, the machine stood still. A busy machine wakes it much sooner.
LATE_S = 0.5
#: How long the other ranks may go on after one has raised. Its process lives, so the others get no error from the
#: backend; on a busy machine they may be about to raise the same exception.
RAISE_GRACE_S = 1.0
#: Enough for work of milliseconds, if there is a processor: to write a stack, to end.
MOMENT_S = 1.0
#: The next scenario waits at most so long for running ones, however busy the processors are.
PATIENCE_S = 2.0
#: How much later than the deadline an agent may answer: it reads the last report, and makes its rank write a stack.
MARGIN_S = 3.0
#: A subject that hangs again and again gets this deadline; a zygote as much to end its ranks.
SHORT_DEADLINE_S = 5.0
#: A peer that neither sends nor reads for so long, though it should, is lost: it has ended, its host is down or the
#: link to it is cut. A zygote may take as long to report a death.
LOST_S = 10.0
#: How long lanes may take to end their ranks after the order to stop.
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
