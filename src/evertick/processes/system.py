"""The operating system's calls: those of Linux there, the portable ones elsewhere. The only module that chooses.

PORTABLE_PROCESSES in the environment forces the portable ones, for tests.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or (sys.platform == "linux" and "PORTABLE_PROCESSES" not in os.environ):
    from evertick.processes.linux import CHILD_POLL_MS as CHILD_POLL_MS
    from evertick.processes.linux import IS_PORTABLE as IS_PORTABLE
    from evertick.processes.linux import MessageSocket as MessageSocket
    from evertick.processes.linux import Pin as Pin
    from evertick.processes.linux import ProcessFacts as ProcessFacts
    from evertick.processes.linux import SignalMask as SignalMask
    from evertick.processes.linux import adopted as adopted
    from evertick.processes.linux import all_pids as all_pids
    from evertick.processes.linux import become_session_leader as become_session_leader
    from evertick.processes.linux import become_subreaper as become_subreaper
    from evertick.processes.linux import block_signals as block_signals
    from evertick.processes.linux import boot_id as boot_id
    from evertick.processes.linux import boot_seconds as boot_seconds
    from evertick.processes.linux import children_of as children_of
    from evertick.processes.linux import command_line as command_line
    from evertick.processes.linux import die_with_parent as die_with_parent
    from evertick.processes.linux import exit_fd as exit_fd
    from evertick.processes.linux import expect_children as expect_children
    from evertick.processes.linux import facts_of as facts_of
    from evertick.processes.linux import first_environment as first_environment
    from evertick.processes.linux import forget_variable as forget_variable
    from evertick.processes.linux import fork_sibling as fork_sibling
    from evertick.processes.linux import left_behind as left_behind
    from evertick.processes.linux import message_pair as message_pair
    from evertick.processes.linux import message_socket as message_socket
    from evertick.processes.linux import namespaces as namespaces
    from evertick.processes.linux import native_threads as native_threads
    from evertick.processes.linux import owners_of as owners_of
    from evertick.processes.linux import pin as pin
    from evertick.processes.linux import punch_hole as punch_hole
    from evertick.processes.linux import reap_any as reap_any
    from evertick.processes.linux import recv_fds as recv_fds
    from evertick.processes.linux import resident_bytes as resident_bytes
    from evertick.processes.linux import sees_own_pids as sees_own_pids
    from evertick.processes.linux import send_fds as send_fds
    from evertick.processes.linux import send_signal as send_signal
    from evertick.processes.linux import signal_fd as signal_fd
    from evertick.processes.linux import signal_mask as signal_mask
    from evertick.processes.linux import tied_to_this_process as tied_to_this_process
    from evertick.processes.linux import unpin as unpin
    from evertick.processes.linux import use_huge_pages as use_huge_pages
else:
    from evertick.processes.portable import CHILD_POLL_MS as CHILD_POLL_MS
    from evertick.processes.portable import IS_PORTABLE as IS_PORTABLE
    from evertick.processes.portable import MessageSocket as MessageSocket
    from evertick.processes.portable import Pin as Pin
    from evertick.processes.portable import ProcessFacts as ProcessFacts
    from evertick.processes.portable import SignalMask as SignalMask
    from evertick.processes.portable import adopted as adopted
    from evertick.processes.portable import all_pids as all_pids
    from evertick.processes.portable import become_session_leader as become_session_leader
    from evertick.processes.portable import become_subreaper as become_subreaper
    from evertick.processes.portable import block_signals as block_signals
    from evertick.processes.portable import boot_id as boot_id
    from evertick.processes.portable import boot_seconds as boot_seconds
    from evertick.processes.portable import children_of as children_of
    from evertick.processes.portable import command_line as command_line
    from evertick.processes.portable import die_with_parent as die_with_parent
    from evertick.processes.portable import exit_fd as exit_fd
    from evertick.processes.portable import expect_children as expect_children
    from evertick.processes.portable import facts_of as facts_of
    from evertick.processes.portable import first_environment as first_environment
    from evertick.processes.portable import forget_variable as forget_variable
    from evertick.processes.portable import fork_sibling as fork_sibling
    from evertick.processes.portable import left_behind as left_behind
    from evertick.processes.portable import message_pair as message_pair
    from evertick.processes.portable import message_socket as message_socket
    from evertick.processes.portable import namespaces as namespaces
    from evertick.processes.portable import native_threads as native_threads
    from evertick.processes.portable import owners_of as owners_of
    from evertick.processes.portable import pin as pin
    from evertick.processes.portable import punch_hole as punch_hole
    from evertick.processes.portable import reap_any as reap_any
    from evertick.processes.portable import recv_fds as recv_fds
    from evertick.processes.portable import resident_bytes as resident_bytes
    from evertick.processes.portable import sees_own_pids as sees_own_pids
    from evertick.processes.portable import send_fds as send_fds
    from evertick.processes.portable import send_signal as send_signal
    from evertick.processes.portable import signal_fd as signal_fd
    from evertick.processes.portable import signal_mask as signal_mask
    from evertick.processes.portable import tied_to_this_process as tied_to_this_process
    from evertick.processes.portable import unpin as unpin
    from evertick.processes.portable import use_huge_pages as use_huge_pages
