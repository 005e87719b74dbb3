// The orchestrator's status, asked every two seconds. What engines and clients say is set as text, never as markup.

import { at, bar, clock, count, duration, empty, make, poll, rate, show, table } from "./view.js";

const STATUS = "/_orchestrator/status";
const GOOD = new Set(["up", "draining"]);

const seconds = (value) => (value === null || value === undefined ? "–" : duration(value));
const wrong = (text) => make("span", { className: "wrong", text });

function engineRow(engine) {
  const events = Object.values(engine.events);
  return [
    engine.name,
    GOOD.has(engine.status) ? engine.status : wrong(engine.status),
    engine.models.join(", "),
    `${engine.active} of ${engine.requests_max}`,
    bar(engine.active, engine.requests_max, `${engine.active} of ${engine.requests_max} requests run`),
    String(engine.waiting),
    seconds(engine.queue_s),
    count(engine.blocks),
    events.length ? events.join(", ") : "none",
    engine.has_store ? "yes" : "no",
    engine.last_error || "",
  ];
}

function decisionRow(receipt) {
  const chosen = receipt.predictions.find((each) => each.engine === receipt.engine);
  const others = receipt.predictions.filter((each) => each !== chosen).slice(0, 3);
  const isWrong = receipt.status === null || receipt.status >= 400;
  return [
    clock(receipt.at),
    receipt.engine ?? "–",
    receipt.reason,
    receipt.prompt_tokens === null ? "–" : count(receipt.prompt_tokens),
    chosen ? count(chosen.held_tokens) : "–",
    chosen ? `${count(chosen.load_tokens)}${chosen.rate_bytes_per_s ? ` at ${rate(chosen.rate_bytes_per_s)}` : ""}` : "–",
    seconds(chosen?.queue_s),
    seconds(chosen?.compute_s),
    seconds(chosen?.ttft_s),
    seconds(receipt.ttft_s),
    others.map((each) => `${each.engine} ${duration(each.ttft_s)}`).join(", "),
    isWrong ? wrong(receipt.note || String(receipt.status ?? "gone")) : String(receipt.status),
    receipt.tenant || "",
    receipt.request_id,
  ];
}

function render(status) {
  at("summary").textContent = `policy ${status.policy} · ${status.active} requests run, ${status.waiting} wait · ${count(status.blocks)} blocks known`;
  show("engines", status.engines.length
    ? table("By name", [
        ["engine", "name"], ["state", ""], ["models", "name"], ["requests", "number"], ["share", ""], ["waiting", "number"], ["queue", "number"],
        ["blocks", "number"], ["KV events", ""], ["store", ""], ["last error", "name"],
      ], status.engines.map(engineRow))
    : empty("No engine: start with --engine URL, or POST /_orchestrator/engines."));
  show("decisions", status.receipts.length
    ? table("The latest first", [
        ["at", ""], ["engine", "name"], ["why", ""], ["prompt", "number"], ["held", "number"], ["to load", "number"], ["queue", "number"],
        ["compute", "number"], ["predicted", "number"], ["first token", "number"], ["others", "name"], ["status", ""], ["tenant", "name"], ["request", "name"],
      ], status.receipts.map(decisionRow))
    : empty("No request since the start."));
}

poll(STATUS, {
  credentials: ["token"],
  wanted: "Type the admin token.",
  isEnough: ([token]) => Boolean(token),
  headers: ([token]) => ({ Authorization: `Bearer ${token}` }),
  render,
  forget: () => {},
});
