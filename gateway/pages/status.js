// The status of ObjectCache, asked every two seconds. What servers and clients say is set as text, never as markup.

import { signed } from "/_objectcache/sigv4.js";

const STATUS = "/_objectcache/status";
const PERIOD_MS = 2000;
const region = document.body.dataset.region;
const at = (id) => document.getElementById(id);

let headersOf = null;
let before = null;
let timer = 0;
let session = 0;

function make(name, { text, className, children = [], ...attributes } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; nbytes >= 1024 && unit < units.length - 1; unit++) nbytes /= 1024;
  return `${unit && nbytes < 100 ? nbytes.toFixed(1) : Math.round(nbytes)} ${units[unit]}`;
}

const rate = (perSecond) => `${size(perSecond)}/s`;
const count = (number) => number.toLocaleString("en-US");
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

function duration(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

const clock = (unixS) => new Date(1000 * unixS).toLocaleTimeString("en-GB");

function bar(part, whole, label) {
  const filled = make("span");
  filled.style.width = `${whole ? Math.min(100, (100 * part) / whole) : 0}%`;
  return make("div", { className: "bar", role: "img", "aria-label": label, children: [filled] });
}

function list(rows) {
  return make("dl", { children: rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]) });
}

function table(caption, columns, rows) {
  const head = make("tr", {
    children: columns.map(([name, className]) => make("th", { text: name, scope: "col", className })),
  });
  const body = rows.map((cells) =>
    make("tr", {
      children: cells.map((cell, index) => {
        const className = columns[index][1];
        if (cell instanceof Node) return make("td", { className, children: [cell] });
        return make("td", { className, text: cell, title: className === "name" ? cell : "" });
      }),
    }),
  );
  const made = make("table", {
    children: [make("caption", { text: caption }), make("thead", { children: [head] }), make("tbody", { children: body })],
  });
  return make("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": caption, children: [made] });
}

const empty = (text) => make("p", { className: "empty", text });

function show(id, ...nodes) {
  const place = at(id);
  const focused = place.contains(document.activeElement);
  const scrolled = place.firstElementChild?.scrollLeft ?? 0;
  place.replaceChildren(...nodes);
  if (focused) place.querySelector("[tabindex]")?.focus({ preventScroll: true });
  if (scrolled) place.firstElementChild.scrollLeft = scrolled;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

function formerOf(name) {
  return before?.status.storage_servers.find((server) => server.name === name);
}

function grown(now, then, seconds) {
  return then === undefined || seconds <= 0 ? 0 : Math.max(0, now - then) / seconds;
}

function serverCard(server, seconds) {
  const former = formerOf(server.name);
  const bound = server.bound_bytes ?? server.used_bytes + server.free_bytes;
  const transports = Object.entries(server.sent_bytes).map(([transport, nbytes]) => [
    `sent over ${transport}`,
    `${rate(grown(nbytes, former?.sent_bytes[transport] ?? (former && 0), seconds))}, ${size(nbytes)} in all`,
  ]);
  const asked = server.dram_hit_count + server.dram_missed_count;
  return make("div", {
    className: "card",
    children: [
      make("h3", { text: server.name || "this server" }),
      bar(server.used_bytes, bound, `${share(server.used_bytes, bound)} of the room is used`),
      list([
        ["stored", `${size(server.used_bytes)} of ${size(bound)}`],
        ["memory", server.dram_bytes ? `${size(server.dram_used_bytes)} of ${size(server.dram_bytes)}` : "no DRAM tier"],
        ...(server.dram_bytes ? [["read from memory", share(server.dram_hit_count, asked)]] : []),
        ["chunks found by lookups", `${share(server.matched_chunk_count, server.asked_chunk_count)} of ${count(server.asked_chunk_count)}`],
        ["lookups", `${grown(server.lookup_count, former?.lookup_count, seconds).toFixed(1)} /s`],
        ...transports,
        ["transports", ["http", ...(server.has_shm ? ["shm"] : []), ...(server.has_ucx ? ["ucx"] : [])].join(", ")],
        ...(server.upstream ? [["in front of", server.upstream]] : []),
        ["runs", `${server.version}, for ${duration(server.uptime_s)}`],
      ]),
    ],
  });
}

function cachedRows(server, many, seconds) {
  const former = formerOf(server.name);
  return server.caches.flatMap((cache) => {
    const then = former?.caches.find((each) => each.bucket === cache.bucket);
    const place = `${many ? `${server.name}: ` : ""}${cache.bucket || "all buckets"}`;
    const capacity = cache.capacity_bytes ?? server.bound_bytes;
    const used = capacity ? `${size(cache.used_bytes)} of ${size(capacity)}` : size(cache.used_bytes);
    const models = Object.entries(cache.models).map(([model, [objects, nbytes]]) => [
      "", model || "other objects", count(objects), size(nbytes), bar(nbytes, cache.used_bytes, share(nbytes, cache.used_bytes)), "", "", "",
    ]);
    return [
      [
        place,
        "",
        count(cache.object_count),
        used,
        bar(cache.used_bytes, capacity, share(cache.used_bytes, capacity)),
        rate(grown(cache.read_bytes, then?.read_bytes, seconds)),
        count(cache.evicted_count),
        cache.eviction_age_s === null ? "nothing left" : duration(cache.eviction_age_s),
      ],
      ...models,
    ];
  });
}

function layers(delivery) {
  const shown = Math.min(delivery.group_count, 128);
  const late = [...delivery.groups].filter((group) => group === "l").length;
  const text = `${delivery.groups.length} of ${delivery.group_count} sent, ${late} late`;
  const strip = make("div", { className: "layers", role: "img", "aria-label": text, title: text });
  for (let index = 0; index < shown; index++) {
    const from = Math.floor((index * delivery.group_count) / shown);
    const upTo = Math.max(from + 1, Math.floor(((index + 1) * delivery.group_count) / shown));
    const groups = delivery.groups.slice(from, upTo);
    strip.append(make("span", { className: groups.includes("l") ? "late" : groups.length === upTo - from ? "ready" : "" }));
  }
  return strip;
}

function stall(seconds) {
  if (seconds === null) return "not known";
  return seconds ? make("span", { className: "wrong", text: duration(seconds) }) : "none";
}

function deliveryRow(delivery, name) {
  const outcome = delivery.outcome || "under way";
  const isWrong = !["done", "under way"].includes(outcome);
  return [
    clock(delivery.began_at),
    `${name ? `${name}: ` : ""}${delivery.bucket}`,
    layers(delivery),
    stall(delivery.stalled_s),
    duration(delivery.elapsed_s),
    `${size(delivery.sent_bytes)} of ${size(delivery.nbytes)}`,
    delivery.transport,
    delivery.mode || "being planned",
    delivery.rate_bytes_per_s ? rate(delivery.rate_bytes_per_s) : "no limit",
    isWrong ? make("span", { className: "wrong", text: outcome }) : outcome,
    delivery.request_id,
  ];
}

function linkText(servers) {
  return servers
    .map(({ name, scheduler }) => {
      const link = scheduler.link_bytes_per_s === null
        ? "the link has no limit, so nothing is scheduled"
        : `the link of ${rate(scheduler.link_bytes_per_s)} is shared by ${scheduler.policy}: ${scheduler.layerwise_active} layer-major and`
          + ` ${scheduler.chunkwise_active} chunk-major deliveries now, ${scheduler.layerwise_waiting + scheduler.chunkwise_waiting} wait,`
          + ` ${size(scheduler.queued_bytes)} to send`;
      return `${name ? `${name}: ` : ""}${link}.`;
    })
    .join(" ");
}

function render(status, nowMs) {
  const seconds = before ? (nowMs - before.ms) / 1000 : 0;
  const { gateway, storage_servers: servers } = status;
  const many = servers.length > 1;
  at("gateway").textContent = `${gateway.version} · ${gateway.region} · up ${duration(gateway.uptime_s)}`;
  show("servers", ...(servers.length ? servers.map((server) => serverCard(server, seconds)) : [empty("No storage server answers.")]));
  const rows = servers.flatMap((server) => cachedRows(server, many, seconds));
  show("cached", rows.length
    ? table("By bucket and model", [
        ["bucket", "name"], ["model", "name"], ["objects", "number"], ["bytes", "number"], ["share", ""], ["read", "number"],
        ["evicted", "number"], ["eviction age", "number"],
      ], rows)
    : empty("No bucket is a cache yet. `objectcache mb NAME --cache`, and the connectors, make one."));
  at("link").textContent = linkText(servers);
  const deliveries = servers.flatMap((server) => server.deliveries.map((delivery) => [delivery, many ? server.name : ""]));
  deliveries.sort(([a], [b]) => (a.outcome === "") === (b.outcome === "") ? b.began_at - a.began_at : a.outcome ? 1 : -1);
  show("deliveries", deliveries.length
    ? table("Deliveries under way, then those that ended last", [
        ["began", ""], ["bucket", "name"], ["layers", ""], ["stall", "number"], ["time", "number"], ["sent", "number"],
        ["transport", ""], ["mode", ""], ["rate", "number"], ["outcome", ""], ["request", "name"],
      ], deliveries.map(([delivery, name]) => deliveryRow(delivery, name)))
    : empty("No delivery since the start."));
  show("failures", gateway.failures.length
    ? table("The latest first", [
        ["at", ""], ["status", "number"], ["error", ""], ["operation", ""], ["bucket", "name"], ["request", "name"],
      ], gateway.failures.map((each) => [
        clock(each.at),
        each.status >= 500 ? make("span", { className: "wrong", text: String(each.status) }) : String(each.status),
        each.code, each.operation, each.bucket, each.request_id,
      ]))
    : empty("No request has failed since the start."));
  before = { status, ms: nowMs };
}

function say(text, isBad = false) {
  const place = at("state");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("bad", isBad);
}

async function ask() {
  const response = await fetch(STATUS, { headers: headersOf(), cache: "no-store", credentials: "omit" });
  if (response.ok) return response.json();
  const text = await response.text();
  const problem = new DOMParser().parseFromString(text, "application/xml").querySelector("Message")?.textContent;
  throw Object.assign(new Error(problem || `the server answers ${response.status}`), { isRefusal: response.status < 500 });
}

async function update(mine) {
  try {
    const status = await ask();
    if (mine !== session) return;
    render(status, performance.now());
    at("sign-in").hidden = true;
    at("content").hidden = at("sign-out").hidden = false;
    say("live");
  } catch (error) {
    if (mine !== session) return;
    if (error.isRefusal) {
      signOut(error.message);
      return;
    }
    say(before ? "no answer: these are the last figures" : "no answer", true);
    at("refusal").textContent = before ? "" : `The server does not answer: ${error.message}`;
    if (!before) return;
  }
  timer = setTimeout(update, PERIOD_MS, mine);
}

function signOut(reason = "") {
  session += 1;
  clearTimeout(timer);
  headersOf = before = null;
  at("content").hidden = at("sign-out").hidden = true;
  for (const id of ["servers", "cached", "deliveries", "failures"]) at(id).replaceChildren();
  at("gateway").textContent = at("link").textContent = "";
  at("secret-key").value = at("token").value = "";
  at("sign-in").hidden = false;
  at("refusal").textContent = reason;
  say("");
  at(at("access-key").value ? "secret-key" : "access-key").focus();
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const [accessKey, secretKey, token] = ["access-key", "secret-key", "token"].map((id) => at(id).value.trim());
  at("refusal").textContent = "";
  if (!token && !(accessKey && secretKey)) {
    at("refusal").textContent = "Type an access key and its secret key, or a token.";
    return;
  }
  headersOf = token
    ? () => ({ Authorization: `Bearer ${token}` })
    : () => signed(STATUS, location.host, region, accessKey, secretKey, new Date());
  session += 1;
  clearTimeout(timer);
  say("signing in");
  update(session);
});
at("sign-out").addEventListener("click", () => signOut());
signOut();
