"""Every time-out, pause and period of raystate that is no setting: how long, what waits, what happens then.

A wait that a user may want to be longer or shorter is a field of `StateConfig`. All others are here,
and nowhere else (tests/house/test_waits.py). Two waits that mean the same share a name. The comment
above a name says what waits; from "Then" on it says what follows. docs/reference/waits.md shows them.
"""

from __future__ import annotations

# ---------------------------------------------------------------- looking again

# What ends within milliseconds on this machine: a connection, a process that starts, a group's ends.
# Then it is looked at again, until the wait's own deadline.
SOON_S = 0.01
# A loop for what another process or storage does, such as the Coordinator's and a writer's of records.
# Then it looks, asks or writes again, until the wait's own deadline.
AGAIN_S = 0.1
# A loop for what changes seldom: progress, room for workers, drained nodes, a run's new steps.
# Then it looks again.
LOOK_EVERY_S = 1.0
# The HostActor, for a ring of a trainer's bell.
# Then it reads the trainers' words all the same, so that a lost ring costs no more than this.
WORDS_EVERY_S = 0.25
# Counts of processes, for metrics.
# Then the HostActors report it, and it is given to Ray; a longer pause would be Ray's own.
EXPORT_EVERY_S = 5.0
# The steps that the rate of a run is made of, in its status and metrics.
# Then they are too old for it.
PACE_S = 60.0
# Ray Train's controller, between two looks at its workers.
# Then it looks again; Ray's own 2 s would be a second on average until a death is noticed.
TRAIN_POLL_S = 0.2
# A command asks a Coordinator for its goodput, which it computes then.
# Then it is computed anew; until then it is what it was.
GOODPUT_EVERY_S = 10.0

# ---------------------------------------------------------------- trying again

# What has just failed or is not answered: storage, a claim, a command, a turn of a loop.
# Then it is tried again; where each pause is twice the one before, this is the first.
RETRY_FIRST_S = 1.0
# What has failed again and again, such as the start of a HostActor that was killed.
# Then it is tried again; pauses grow no longer than this.
RETRY_LAST_S = 30.0
# An order to write, or a request to storage, of which nothing was heard; a look at attempts known dead.
# Then it is given, sent or done again.
ASKED_AGAIN_S = 15.0
# A run without a durable step, after a failed try to make its first one.
# Then another step is tried.
FIRST_STEP_AGAIN_S = 10.0

# ---------------------------------------------------------------- questions to processes

# A trainer or launcher that asks the Coordinator or a HostActor by the way.
# Then it goes on without the answer.
QUICK_ANSWER_S = 5.0
# Who asks a Coordinator, storage or a waiting process one short question that it depends on; a copy, for a buffer.
# Then it takes the other for gone, or says that it does not answer.
ANSWER_S = 10.0
# Who asks storage by the way: the newest step, whose storage it is.
# Then what memory or the Coordinator knows has to do.
QUICK_STORAGE_S = 3.0
# A trainer, beyond the deadline that the Coordinator itself keeps for the answer.
# Then the call fails; until then the Coordinator's own error can name who is missing.
REPLY_MARGIN_S = 30.0
# Who connects to a process or server; a HostActor, for a trainer that has joined.
# Then the connection is tried again, or the trainer counts as gone.
CONNECT_S = 5.0
# A probe of a node's raylet, before ranks are placed there.
# Then the node counts as gone.
NODE_REACHED_S = 0.5
# A process that only waits, or writes a word at once: an idle HostActor, a word, stacks.
# Then the asker goes on without it.
AT_ONCE_S = 2.0
# The other ranks or processes at a group's start or end, for their own news or their resources.
# Then the group is judged or started without them. Ends of a node that differ by less are one.
MOMENT_S = 1.0
# The metadata server, for a change; a test's hold at a fault point.
# Then the server answers although nothing has changed; the hold is let go.
HELD_S = 60.0

# ---------------------------------------------------------------- starts and ends of processes

# Another process of the same start: rank 0's listener, a joined trainer's HostActor, a run's folder.
# Then the start goes on without it, or fails and names it.
STARTS_S = 60.0
# A Coordinator that was killed and can't begin, or whose storage another run has.
# Then it ends, and the next start of the run makes another one; `raystate status --watch` says that the run may have died.
COORDINATOR_STARTS_S = 120.0
# A Coordinator's attempt that crashes sooner than this after its start.
# Then no other attempt is made: it would fail again and again.
CRASHED_AGAIN_S = 10.0
# A HostActor that is killed, to be started again by Ray.
# Then its node is of no use to the run, and the reason is told.
HOST_RESTARTS_S = 20.0
# A node on which no HostActor could be made to wait.
# Then another one is tried there.
UNFIT_NODE_S = 60.0
# A worker group that is to start where its snapshots are.
# Then its workers may go anywhere.
PINNED_START_S = 10.0
# Standby processes, from the group's start: not before its first steps.
# Then they are started, if the group has saved.
STANDBY_FIRST_S = 3.0
# Standby processes, for a group whose steps take long or aren't saved.
# Then they are started all the same.
STANDBY_LAST_S = 15.0
# A restarted worker, for the end of the one before and for the memory that it held of a GPU.
# Then it starts on the GPU with what is free.
DEVICE_FREE_S = 5.0
# A process that ends, for what is under way in it: its last replies and writes; a HostActor, for a killed trainer's process.
# Then it ends all the same; the trainer's slots are not handed on, and the next one gets others.
GOODBYE_S = 5.0
# Who has told a process, an actor or a thread to end.
# Then it is killed, or left to the next start.
ENDS_S = 20.0
# A host that was told to end a trainer that hangs.
# Then the host is of no use, and the whole group ends.
HANG_ENDS_S = 10.0

# ---------------------------------------------------------------- hosts and their reports

# A HostActor with news: reports are gathered for so long.
# Then they go in one message.
REPORT_EVERY_S = 0.05
# A HostActor without news.
# Then it reports that it is there.
HEARTBEAT_S = 1.0
# A host that reports every second and has not been heard; a process that has not looked at its own clock.
# Then the host is silent: nothing new is begun that needs it. The process stood still itself, and
# neither that time nor as much after it counts against others.
HOST_SILENT_S = 3.0
# The clocks of two Coordinators, one after the other, apart by this or less, as the worker group tells that both have heard.
# Then both are believed; a clock that is further away is put right by the group's own.
CLOCKS_APART_S = 30.0
# A host whose HostActor has ended, and may start again.
# Then nothing waits for it any more.
HOST_AWAY_S = 30.0
# What was heard of a run's user last: its trainers live, or start again.
# Then it says nothing any more, and another launch may have the run.
HEARD_S = 10.0
# A node that was to go away and is still there.
# Then it counts as one that stays; its HostActor stops telling of it after half of this.
OVERDUE_S = 60.0
# A preempted node, from its cloud's notice.
# Then the cloud takes it away.
PREEMPTION_S = 30.0
# A node whose processes got SIGTERM.
# Then it is expected to be gone.
SIGTERM_S = 20.0
# The size of an elastic run, for room for more workers that has just come.
# Then it counts as room that stays, and the run may grow.
ROOM_STAYS_S = 10.0
# An elastic run, from a start to its next growth.
# Then it may grow. Ray Train's own default is a minute; a restart costs seconds here.
RESIZE_EVERY_S = 30.0

# ---------------------------------------------------------------- saves and storage

# A run without a rule for durable saves, until one was measured.
# Then the next save is durable.
UNMEASURED_SAVE_EVERY_S = 300.0
# The same, once its cost and the losses of memory are known, which ask for a time: at least this one.
# Then the next save is durable.
LEAST_SAVE_EVERY_S = 60.0
# As before: at most this one.
# Then the next save is durable.
MOST_SAVE_EVERY_S = 1800.0
# A due save that needs a slot, after the last progress of storage.
# Then the older save gives way, by name.
STORAGE_STILL_S = 10.0
# A trainer's newest snapshot without a slot, after the last save: the next one would be newer.
# Then it is copied as soon as a slot is free.
SAVES_PAUSE_S = 0.25
# A copy of a snapshot that is spread out since it slows the steps. JAX waits 10 s for the memory that it holds.
# Then it has ended, however long the time to the next snapshot is.
COPY_SPREAD_S = 4.0
# The log, after its last change.
# Then the Coordinator closes the intents that were carried out.
LOG_CLOSED_S = 30.0
# A HostActor's call of another one for a piece of a peer copy or of a restore.
# Then the piece is taken from another host or tier.
PEER_CALL_S = 20.0
# The copy of one step to a peer.
# Then it fails, and the step has no copy there.
TRANSFER_S = 300.0
# One wait that may move large data: an operation of TensorStore, a save at exit, an item's own code, a rehearsal.
# Then it is an error that names what is not done.
LONGEST_S = 600.0
# The processes that save one checkpoint, for all of them to call save.
# Then it is an error that names who has not.
MEET_S = 300.0
# The processes that save one checkpoint, for all to have written their shares.
# Then it is an error that names who has not.
SHARE_WRITTEN_S = 3600.0
# A trainer that is about to compile, for the list of its run's compiled programs and for one of them.
# Then it compiles what its node lacks, and waits for no other.
PROGRAMS_S = 30.0
# A trainer with new programs, for more of them; ranks other than 0 twice as long: they may lack none then.
# Then they go to storage.
PROGRAMS_GATHERED_S = 2.0
# A test's Cloud Storage, between two changes of one name.
# Then the second counts as one that a real bucket takes without a refusal.
NAME_CHANGES_S = 1.0

# ---------------------------------------------------------------- files of a host

# Sizes of arenas, which are added up and promised under one lock, in milliseconds.
# Then it is an error that names who holds it.
ARENA_LOCK_S = 30.0
# A file that another process makes, replaces, removes or shows, each time that it is looked at.
# Then it is an error, or whose it is stays open.
FILE_S = 5.0
# Layouts in an arena that no slot needs.
# Then they are removed.
PRUNE_EVERY_S = 60.0
# What has lost its writer, or had no word of its end.
# Then it counts as left behind, and is removed or forgotten.
ABANDONED_S = 3600.0

# ---------------------------------------------------------------- what people are told

# The ledger, for how far a worker group is; while it is young, for a twentieth of its life instead.
# Then a line says so.
SAMPLED_EVERY_S = 30.0

# A bar on a terminal, for what ends at once.
# Then it is shown.
SHOWN_AFTER_S = 1.0
# A wait that a person should know of.
# Then a line of the log says what is waited for.
TOLD_AFTER_S = 10.0
# A trouble that lasts.
# Then it is told again.
SAID_AGAIN_S = 60.0
# A wait that goes on and on: each pause between its lines is twice the one before.
# Then it is told again; pauses grow no longer than this.
SELDOM_S = 300.0
