// Signature Version 4 of a GET without a body. The browser's own crypto is there over TLS and on localhost only, and a
// server inside a cluster is often reached otherwise: hence SHA-256 (FIPS 180-4) here.

const PRIMES = (() => {
  const found = [];
  for (let number = 2; found.length < 64; number++) {
    if (found.every((prime) => number % prime)) found.push(number);
  }
  return found;
})();
const fraction = (number) => ((number - Math.floor(number)) * 2 ** 32) | 0;
const START = PRIMES.slice(0, 8).map((prime) => fraction(Math.sqrt(prime)));
const ROUNDS = PRIMES.map((prime) => fraction(Math.cbrt(prime)));
const EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

const right = (word, by) => (word >>> by) | (word << (32 - by));

export function sha256(bytes) {
  const padded = new Uint8Array(((bytes.length + 72) >> 6) << 6);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(padded.length - 4, (bytes.length << 3) >>> 0);
  const state = [...START];
  const words = new Int32Array(64);
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 16; i++) words[i] = view.getInt32(at + 4 * i);
    for (let i = 16; i < 64; i++) {
      const low = right(words[i - 15], 7) ^ right(words[i - 15], 18) ^ (words[i - 15] >>> 3);
      const high = right(words[i - 2], 17) ^ right(words[i - 2], 19) ^ (words[i - 2] >>> 10);
      words[i] = (words[i - 16] + low + words[i - 7] + high) | 0;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const mixed = right(e, 6) ^ right(e, 11) ^ right(e, 25);
      const first = (h + mixed + ((e & f) ^ (~e & g)) + ROUNDS[i] + words[i]) | 0;
      const second = ((right(a, 2) ^ right(a, 13) ^ right(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { state[i] = (state[i] + word) | 0; });
  }
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, i) => digest.setInt32(4 * i, word));
  return new Uint8Array(digest.buffer);
}

const utf8 = (text) => new TextEncoder().encode(text);
const joined = (...parts) => new Uint8Array(parts.flatMap((part) => [...part]));
export const hex = (bytes) => [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export function hmac(key, text) {
  const block = new Uint8Array(64);
  block.set(key.length > 64 ? sha256(key) : key);
  const inner = sha256(joined(block.map((byte) => byte ^ 0x36), utf8(text)));
  return sha256(joined(block.map((byte) => byte ^ 0x5c), inner));
}

export function signed(path, host, region, accessKey, secretKey, now) {
  const time = `${now.toISOString().replace(/[-:]|\.\d+/g, "")}`;
  const scope = [time.slice(0, 8), region, "s3", "aws4_request"];
  const names = "host;x-amz-content-sha256;x-amz-date";
  const request = `GET\n${path}\n\nhost:${host}\nx-amz-content-sha256:${EMPTY}\nx-amz-date:${time}\n\n${names}\n${EMPTY}`;
  const text = `AWS4-HMAC-SHA256\n${time}\n${scope.join("/")}\n${hex(sha256(utf8(request)))}`;
  const key = scope.reduce((before, part) => hmac(before, part), utf8(`AWS4${secretKey}`));
  const credential = `${accessKey}/${scope.join("/")}`;
  return {
    "Authorization": `AWS4-HMAC-SHA256 Credential=${credential}, SignedHeaders=${names}, Signature=${hex(hmac(key, text))}`,
    "x-amz-content-sha256": EMPTY,
    "x-amz-date": time,
  };
}
