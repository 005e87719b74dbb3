// Verbs of @aws-sdk/client-s3 for drive_node.py: one JSON request a line on stdin, one JSON answer a line on stdout.
// Bodies travel in files.
const fs = require("node:fs");
const readline = require("node:readline");
const s3 = require("@aws-sdk/client-s3");

const PART_BYTES = 8 * 1024 * 1024;
const settings = JSON.parse(process.argv[2]);
const Bucket = settings.bucket;
const client = new s3.S3Client({
  endpoint: settings.endpoint,
  region: settings.region,
  credentials: { accessKeyId: settings.access_key, secretAccessKey: settings.secret_key },
  forcePathStyle: true,
  maxAttempts: 1,
});

async function read(Key, Range, file) {
  const answer = await client.send(new s3.GetObjectCommand({ Bucket, Key, Range }));
  fs.writeFileSync(file, await answer.Body.transformToByteArray());
}

async function multipart(Key, body) {
  const { UploadId } = await client.send(new s3.CreateMultipartUploadCommand({ Bucket, Key }));
  const starts = Array.from({ length: Math.ceil(body.length / PART_BYTES) }, (_, index) => index * PART_BYTES);
  const Parts = await Promise.all(
    starts.map(async (start, index) => {
      const PartNumber = index + 1;
      const Body = body.subarray(start, start + PART_BYTES);
      const part = await client.send(new s3.UploadPartCommand({ Bucket, Key, UploadId, PartNumber, Body }));
      return { PartNumber, ETag: part.ETag, ChecksumCRC32: part.ChecksumCRC32 };
    }),
  );
  await client.send(new s3.CompleteMultipartUploadCommand({ Bucket, Key, UploadId, MultipartUpload: { Parts } }));
}

const verbs = {
  version: async () => require("@aws-sdk/client-s3/package.json").version,
  put: async ({ key, file }) => {
    await client.send(new s3.PutObjectCommand({ Bucket, Key: key, Body: fs.readFileSync(file) }));
  },
  get: ({ key, file }) => read(key, undefined, file),
  range: ({ key, file, first, last }) => read(key, `bytes=${first}-${last}`, file),
  list: async ({ prefix }) => {
    const keys = [];
    for await (const page of s3.paginateListObjectsV2({ client, pageSize: 2 }, { Bucket, Prefix: prefix })) {
      keys.push(...(page.Contents ?? []).map((entry) => entry.Key));
    }
    return keys;
  },
  multipart: ({ key, file }) => multipart(key, fs.readFileSync(file)),
  delete: async ({ keys }) => {
    const Delete = { Objects: keys.map((Key) => ({ Key })) };
    const answer = await client.send(new s3.DeleteObjectsCommand({ Bucket, Delete }));
    if (answer.Errors?.length) throw new Error(JSON.stringify(answer.Errors));
  },
};

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    let answer;
    try {
      answer = { value: (await verbs[request.verb](request)) ?? null };
    } catch (error) {
      answer = { error: `${error.name}: ${error.message} ${JSON.stringify(error.$metadata ?? {})}` };
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
})();
