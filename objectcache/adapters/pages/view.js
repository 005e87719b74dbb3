// What the pages share: figures as people write them, tables, and the loop that asks. What servers and clients say is
// set as text, never as markup.

const PERIOD_MS = 2000;

export const at = (id) => document.getElementById(id);

export function make(name, { text, className, children = [], ...attributes } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; nbytes >= 1024 && unit < units.length - 1; unit++) nbytes /= 1024;
  return `${unit && nbytes < 100 ? nbytes.toFixed(1) : Math.round(nbytes)} ${units[unit]}`;
}

export const rate = (perSecond) => `${size(perSecond)}/s`;
export const count = (number) => number.toLocaleString("en-US");
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

export function duration(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

export const clock = (unixS) => new Date(1000 * unixS).toLocaleTimeString("en-GB");

export function bar(part, whole, label) {
  const filled = make("span");
  filled.style.width = `${whole ? Math.min(100, (100 * part) / whole) : 0}%`;
  return make("div", { className: "bar", role: "img", "aria-label": label, children: [filled] });
}

export function list(rows) {
  return make("dl", { children: rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]) });
}

export function table(caption, columns, rows) {
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

export const empty = (text) => make("p", { className: "empty", text });

export function show(id, ...nodes) {
  const place = at(id);
  const focused = place.contains(document.activeElement);
  const scrolled = place.firstElementChild?.scrollLeft ?? 0;
  place.replaceChildren(...nodes);
  if (focused) place.querySelector("[tabindex]")?.focus({ preventScroll: true });
  if (scrolled) place.firstElementChild.scrollLeft = scrolled;
}

export function say(text, isBad = false) {
  const place = at("state");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("bad", isBad);
}

// Sign in by the form, then ask every two seconds and render; what was typed stays in this page.
export function poll(path, { credentials, wanted, isEnough, headers, render, forget }) {
  let typed = null;
  let isKnown = false;
  let timer = 0;
  let session = 0;
  const [first, ...secrets] = credentials;

  async function ask() {
    const response = await fetch(path, { headers: headers(typed), cache: "no-store", credentials: "omit" });
    if (response.ok) return response.json();
    throw Object.assign(new Error(problemOf(await response.text(), response.status)), { isRefusal: response.status < 500 });
  }

  async function update(mine) {
    try {
      const status = await ask();
      if (mine !== session) return;
      render(status, performance.now());
      isKnown = true;
      at("sign-in").hidden = true;
      at("content").hidden = at("sign-out").hidden = false;
      say("live");
    } catch (error) {
      if (mine !== session) return;
      if (error.isRefusal) {
        signOut(error.message);
        return;
      }
      say(isKnown ? "no answer: these are the last figures" : "no answer", true);
      at("refusal").textContent = isKnown ? "" : `The server does not answer: ${error.message}`;
      if (!isKnown) return;
    }
    timer = setTimeout(update, PERIOD_MS, mine);
  }

  function signOut(reason = "") {
    session += 1;
    clearTimeout(timer);
    typed = null;
    isKnown = false;
    forget();
    at("content").hidden = at("sign-out").hidden = true;
    for (const place of document.querySelectorAll("[data-shown]")) place.replaceChildren();
    for (const id of credentials.length > 1 ? secrets : credentials) at(id).value = "";
    at("sign-in").hidden = false;
    at("refusal").textContent = reason;
    say("");
    at(secrets.length && at(first).value ? secrets[0] : first).focus();
  }

  at("sign-in").addEventListener("submit", (event) => {
    event.preventDefault();
    const values = credentials.map((id) => at(id).value.trim());
    at("refusal").textContent = "";
    if (!isEnough(values)) {
      at("refusal").textContent = wanted;
      return;
    }
    typed = values;
    session += 1;
    clearTimeout(timer);
    say("signing in");
    update(session);
  });
  at("sign-out").addEventListener("click", () => signOut());
  signOut();
}

// The message of S3's XML, or of OpenAI's JSON.
function problemOf(text, status) {
  let found = new DOMParser().parseFromString(text, "application/xml").querySelector("Message")?.textContent;
  try {
    found ||= JSON.parse(text).error?.message;
  } catch {
    // it is no JSON
  }
  return found || `the server answers ${status}`;
}
