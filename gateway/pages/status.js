// The status of ObjectCache, asked every two seconds. What servers and clients say is set as text, never as markup.

import { signed } from "./sigv4.js";
import { at, bar, clock, count, duration, empty, list, make, poll, rate, share, show, size, table } from "./view.js";

const STATUS = "/_objectcache/status";

let before = null;

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

const region = document.body.dataset.region;

poll(STATUS, {
  credentials: ["access-key", "secret-key", "token"],
  wanted: "Type an access key and its secret key, or a token.",
  isEnough: ([accessKey, secretKey, token]) => Boolean(token || (accessKey && secretKey)),
  headers: ([accessKey, secretKey, token]) =>
    token ? { Authorization: `Bearer ${token}` } : signed(STATUS, location.host, region, accessKey, secretKey, new Date()),
  render,
  forget: () => { before = null; },
});
