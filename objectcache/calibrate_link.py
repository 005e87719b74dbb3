"""`objectcache calibrate --link`: what the link moves, and the margin that a rate needs over r*."""

from __future__ import annotations

import argparse

from bench.calibration.link_measure import measure_links
from bench.calibration.link_points import LinkPlan
from bench.calibration.link_report import link_entries, link_json, link_table, plot_links, scheduler_entries
from bench.calibration.origin import describe_origin
from objectcache.calibrate_run import (
    DONE,
    FAILURES,
    cannot_run,
    config_of,
    failure,
    print_unwritten,
    storage_of,
    target_of,
    transports_of,
    where_of,
    write_json,
)
from objectcache.config_file import check_edit, edit_file
from objectcache.config_text import table_lines, with_link


def calibrate_link(options: argparse.Namespace, plan: LinkPlan) -> int:
    """0: done; 1: could not be measured, or wrong bytes. Where a file is to be written, `options.transport` names the
    transport. Raises ConfigError.
    """
    config = config_of(options)
    target = target_of(options)
    if target is not None:  # before the minutes of measuring
        values = {"link_bytes_per_s": 1.0, "margin_bytes_per_s": 0.0}
        check_edit(target, lambda text: with_link(text, options.transport, values, {"rounds": 1}))
    origin = describe_origin()
    try:
        found = measure_links(plan, transports_of(options), where_of(options, config))
    except FAILURES as error:
        return failure(error)
    reason = cannot_run(options, found.missing)
    if reason is not None or not found.links:
        return failure(reason or "no transport can run here")
    print(link_table(plan, found, origin))
    write_json(options, link_json(plan, found, origin, storage_of(config)))
    if options.plot is not None:
        plot_links(found, options.plot)
    first = found.links[0]
    if target is not None:
        scheduler, entries = scheduler_entries(first), link_entries(plan, first, origin)
        edit_file(target, lambda text: with_link(text, first.transport, scheduler, entries))
        print(f"\n{target}: [scheduler] and [calibration.link.{first.transport}] are written")
        return DONE
    lines = [
        line
        for link in found.links
        for line in [*table_lines(("calibration", "link", link.transport), link_entries(plan, link, origin)), ""]
    ]
    if len(found.links) == 1:
        lines = [*table_lines(("scheduler",), scheduler_entries(first)), "", *lines]
    print_unwritten(lines)
    if len(found.links) > 1:
        print("and, with --transport, [scheduler] with that one's figures")
    return DONE
