// Commands to instances, and documents that instances answer.

import { ApiError, get } from "./api.js";

export const instancePath = (id) => `/v1/instances/${encodeURIComponent(id)}`;

const COMMAND_POLL_MS = 500;
const COMMAND_WAIT_MS = 60_000;

/** Waits until a command has ended, and returns it. Raises ApiError after COMMAND_WAIT_MS. */
async function ended(number) {
  const until = Date.now() + COMMAND_WAIT_MS;
  for (;;) {
    const command = await get(`/v1/commands/${number}`);
    if (command.state === "done" || command.state === "failed") return command;
    if (Date.now() > until) throw new ApiError(0, `Command ${number} has no answer yet; its end will be in the events.`);
    await new Promise((resolve) => setTimeout(resolve, COMMAND_POLL_MS));
  }
}

/** The commands of an answer, once all have ended. */
export function outcomes(answer) {
  return answer.done ? Promise.resolve(answer.commands) : Promise.all(answer.commands.map(({ number }) => ended(number)));
}

/** A document that an instance answers. Raises ApiError if it refuses or does not answer. */
export async function documentOf(path) {
  const answer = await get(path);
  if (answer.done) {
    if (!answer.ok) throw new ApiError(422, answer.message || "The instance refused.");
    return answer.document;
  }
  const { state, message, result } = await ended(answer.command);
  if (state === "failed") throw new ApiError(422, message || "The instance refused.");
  return result;
}
