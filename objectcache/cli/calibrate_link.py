"""`objectcache calibrate link`: the rate of the link, and the margin that a rate needs over r*."""

from __future__ import annotations

import argparse

from objectcache.calibration.link import LinkPlan
from objectcache.calibration.link_report import link_result, link_table, plot_links, scheduler_entries
from objectcache.calibration.measure import measure_links
from objectcache.calibration.origin import describe_origin
from objectcache.cli.calibrate_run import (
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
from objectcache.cli.config_file import check_edit, edit_file
from objectcache.cli.config_text import table_lines, with_values


def calibrate_link(options: argparse.Namespace, plan: LinkPlan) -> int:
    """The exit status: 0 done; 1 could not be measured, or wrong bytes. Where a file is to be written,
    `options.transport` names the transport. Raises ConfigError.
    """
    config = config_of(options)
    target = target_of(options)
    if target is not None:  # before the minutes of measuring
        values = {"link_bytes_per_s": 1.0, "margin_bytes_per_s": 0.0}
        check_edit(target, lambda text: with_values(text, "scheduler", values))
    origin = describe_origin()
    try:
        found = measure_links(plan, transports_of(options), where_of(options, config))
    except FAILURES as error:
        return failure(error)
    reason = cannot_run(options, found["missing"])
    if reason is not None or not found["links"]:
        return failure(reason or "no transport can run here")
    result = link_result(plan, found, origin, storage_of(config))
    print(link_table(result))
    write_json(options, result)
    if options.plot is not None:
        plot_links(result, options.plot)
    first, *others = result["links"]
    scheduler = scheduler_entries(result["links"][first])
    if target is not None:
        edit_file(target, lambda text: with_values(text, "scheduler", scheduler))
        print(f"\n{target}: [scheduler] is written")
    elif others:
        print("\nnothing was written; name the --transport whose figures [scheduler] shall have")
    else:
        print_unwritten(table_lines(("scheduler",), scheduler))
    return DONE
