//! `holdfast run`: the daemon.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::claims::{Claims, Notice, Order, Status};
use holdfast_core::notice::{Report, ShardFailure};
use holdfast_core::ports::members;
use holdfast_core::record::{RecordError, Session};
use holdfast_core::row::ShardId;
use holdfast_nats::members::{Meeting, Members};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};

use crate::assembly::Assembly;
use crate::backlog;
use crate::clock::Clock;
use crate::config::{Config, OnLostShard};
use crate::exit::Exit;
use crate::process::{Process, Stage, UPKEEP};
use crate::serve;
use crate::sharing::{Limits, Observer, Request, Surroundings, share};
use crate::signals::Signals;

/// What is kept back of the time for stopping: giving back the pin takes two requests, resigning one.
const RELEASE_TIME: Duration = Duration::from_secs(2);

/// How long a member may take to answer a request.
const PROBE_TIME: Duration = Duration::from_millis(500);

/// Runs the daemon until it is told to stop, or a shard's loss ends it.
///
/// # Errors
/// What kept it from starting, or ended it, in one line; see [`Exit`] for the codes.
pub async fn run(config: &Config) -> Result<(), Exit> {
    let mut signals = Signals::new()?;
    let clock = Clock::start();
    let process = Arc::new(Process::new(config, Session(rand::random()), clock));
    // Before anything else, so that an address that is taken is said at once, and a start that takes its time seen.
    let _servants = attend(config, &process).await?;
    let (requests, requested) = unbounded_channel();
    let (lead, leads) = watch::channel(false);
    let conductor = Conductor {
        process: Arc::clone(&process),
        exit_on_loss: config.topology.on_lost_shard == OnLostShard::Exit,
        requests: requests.clone(),
        lead,
        within: config.shutdown().saturating_sub(RELEASE_TIME).max(Duration::from_millis(200)),
        course: Mutex::default(),
    };
    let shared = async {
        let assembly = Assembly::new(config, clock, &process).await?;
        let (sink, watch) = unbounded_channel();
        let sink: members::Sink = Arc::new(move |reply| drop(sink.send(reply)));
        let machine = config.claims(process.session())?;
        let meeting = Meeting {
            bucket: assembly.topology.bucket.clone(),
            stream: assembly.topology.stream.clone(),
            member: machine.id.clone(),
            session: process.session(),
            probe: PROBE_TIME,
        };
        let members = Members::start(assembly.control.clone(), meeting, sink, orders(requests.clone()));
        let members = Arc::new(members.await.map_err(Exit::error)?);
        let (report, _unheard) = unbounded_channel();
        let mut servants = assembly.trim(&leads, &report);
        servants.spawn(backlog::watch(
            assembly.control.clone(),
            assembly.topology.clone(),
            Arc::clone(&process),
            requests.clone(),
        ));
        process.enter(Stage::Running);
        let machine = Claims::new(machine, clock.now());
        let limits = Limits { handover: config.handover() };
        let surroundings = Surroundings { members, watch, requests: requested, starter: Arc::new(assembly) };
        let ended = share(machine, clock, surroundings, limits, &conductor).await;
        drop(servants);
        // A shard that panicked leaves nothing behind but what the ledger says; somebody starts us again.
        ended.map_err(|error| {
            Exit::error(format!("a shard's task failed, which is a fault of Holdfast: {error}"))
        })
    };
    tokio::pin!(shared);
    let mut stopping = false;
    loop {
        let kill = async {
            match conductor.deadline() {
                Some(deadline) => tokio::time::sleep_until((deadline + RELEASE_TIME).into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = &mut shared => {
                ended?;
                break;
            }
            () = signals.next() => {}
            () = kill => {
                conductor.course().unwritten = true;
                break;
            }
            // Somebody else began to stop: its deadline counts from then on.
            () = tokio::time::sleep(Duration::from_secs(1)), if conductor.deadline().is_none() => continue,
        }
        if *process.stage() == Stage::Starting {
            return Ok(());
        }
        if stopping {
            return Err(Exit::error("stopped at once; rows that were held come again at the next start"));
        }
        stopping = true;
        conductor.stop();
    }
    conductor.outcome()
}

/// Takes what operators ask of a member over NATS.
fn orders(requests: UnboundedSender<Request>) -> holdfast_nats::members::Orders {
    use holdfast_nats::members::Wish;
    Arc::new(move |wish| {
        // A process that is ending has nothing left to pause.
        let _ = requests.send(match wish {
            Wish::Pause(shard) => Request::Pause(shard),
            Wish::Resume(shard) => Request::Resume(shard),
        });
    })
}

/// Serves health, metrics and status; ends with what it returns.
async fn attend(config: &Config, process: &Arc<Process>) -> Result<JoinSet<()>, Exit> {
    let mut servants = JoinSet::new();
    if let Some(listen) = config.listen()? {
        let listener = serve::bind(listen).await?;
        info!(url = format!("http://{}/", listener.local_addr()?), "status, health and metrics are served");
        servants.spawn(serve::serve(listener, Arc::clone(process)));
    }
    let process = Arc::clone(process);
    servants.spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            process.metrics.upkeep();
        }
    });
    Ok(servants)
}

/// What became of the process so far.
#[derive(Debug, Default)]
struct Course {
    stopping_since: Option<Instant>,
    said_ready: bool,
    /// Given up with rows unwritten.
    unwritten: bool,
    misconfigured: Option<String>,
    /// The first shard that was lost, and whether its consumer was.
    lost: Option<(bool, String)>,
    /// When each shard was told to be given up.
    leaving: std::collections::BTreeMap<ShardId, (&'static str, Instant)>,
    ready: BTreeSet<ShardId>,
}

/// Tells people what the sharing does, and ends the process when a shard's loss asks for it.
struct Conductor {
    process: Arc<Process>,
    exit_on_loss: bool,
    requests: UnboundedSender<Request>,
    /// Whether this member does for all what one has to do.
    lead: watch::Sender<bool>,
    within: Duration,
    course: Mutex<Course>,
}

impl Conductor {
    fn course(&self) -> std::sync::MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline(&self) -> Option<Instant> {
        self.course().stopping_since.map(|since| since + self.within)
    }

    fn stop(&self) {
        let mut course = self.course();
        if course.stopping_since.is_none() {
            info!("stopping: writing what was accepted");
            self.process.enter(Stage::Stopping);
            course.stopping_since = Some(Instant::now());
            let _ = self.requests.send(Request::Stop { within: self.within });
        }
    }

    fn outcome(&self) -> Result<(), Exit> {
        let course = self.course();
        if let Some(why) = &course.misconfigured {
            return Err(Exit::usage(why.clone()));
        }
        match &course.lost {
            Some((true, why)) if self.exit_on_loss => Err(Exit::lost_shard(why.clone())),
            Some((false, why)) if self.exit_on_loss => Err(Exit::error(why.clone())),
            _ => {
                if course.unwritten {
                    warn!(
                        "stopped with rows unwritten; they are in the stream and come again at the next start"
                    );
                } else {
                    info!("stopped");
                }
                Ok(())
            }
        }
    }
}

impl Observer for Conductor {
    fn notice(&self, notice: &Notice) {
        match notice {
            Notice::Joined { member } => info!(%member, "a daemon has joined"),
            Notice::Left { member, why } => info!(%member, why = why.key(), "a daemon has left"),
            Notice::ConfigurationDiffers { member } => {
                warn!(%member, "a daemon has another configuration, or another version");
            }
            Notice::NewerVersion { member } => {
                warn!(%member, "a daemon has a newer version: its shards are left to it; finish the upgrade");
            }
            Notice::Unreadable { key, why } => warn!(key, why, "a member's record cannot be read"),
            Notice::TooManyMembers => error!("there are more members in the bucket than are looked at"),
            Notice::NameTaken { by } => {
                error!(session = ?by, "another daemon has this one's node.id; give each its own");
            }
            Notice::Taken { shard, from } => {
                info!(shard = shard.0, %from, "the shard of a daemon that is gone is claimed");
            }
            Notice::Unowned { shard } => warn!(shard = shard.0, "rows of the shard wait and nobody has it"),
            Notice::Deaf => warn!(
                "the own heartbeat does not come back from the bucket; shards are kept as they are until it does"
            ),
            Notice::Hearing => info!("the own heartbeat comes back again"),
            Notice::NotStored { why } => debug!(why, "the own heartbeat cannot be stored now; tried again"),
        }
    }

    fn report(&self, shard: ShardId, report: &Report) {
        let mut course = self.course();
        match report {
            Report::Ready | Report::Owned { .. } => {
                course.ready.insert(shard);
            }
            // What is left to newer daemons is not lost.
            Report::Lost | Report::Failed(ShardFailure::Record(RecordError::Newer(_))) => {}
            Report::Released { clean } => {
                course.unwritten |= !clean && course.stopping_since.is_some();
                if let Some((reason, since)) = course.leaving.remove(&shard) {
                    self.process.metrics.handed_over(reason, since.elapsed());
                }
            }
            Report::Failed(failure) => {
                let start_needed = *failure == ShardFailure::StartNeeded;
                if start_needed {
                    course.misconfigured.get_or_insert_with(|| failure.to_string());
                } else {
                    let gone = matches!(failure, ShardFailure::ConsumerGone(_));
                    course.lost.get_or_insert_with(|| (gone, format!("shard {shard}: {failure}")));
                }
                if self.exit_on_loss || start_needed {
                    drop(course);
                    self.stop();
                }
            }
        }
    }

    fn ordered(&self, shard: ShardId, order: &Order) {
        let mut course = self.course();
        let reason = match order {
            Order::Claim { .. } => {
                course.ready.remove(&shard);
                debug!(shard = shard.0, "claimed");
                return;
            }
            Order::GiveUp => "rebalance",
            Order::Stop { .. } => "shutdown",
            Order::Share(_) | Order::OwnerGone(_) => return,
        };
        info!(shard = shard.0, reason, "giving the shard up");
        course.leaving.insert(shard, (reason, Instant::now()));
    }

    fn status(&self, status: &Status<'_>) {
        self.process.share(status);
        self.lead.send_if_modified(|leads| std::mem::replace(leads, status.leads) != status.leads);
        let mut course = self.course();
        let mut mine = status.shards.iter().filter(|shard| shard.mine != "free").peekable();
        if status.ready && !course.said_ready && course.lost.is_none() && course.misconfigured.is_none() {
            let alone = status.members.iter().all(|member| member.gone.is_some());
            let has_some = mine.peek().is_some();
            if mine.all(|shard| course.ready.contains(&shard.shard)) && (has_some || !alone) {
                course.said_ready = true;
                info!("ready: every shard of this daemon has its record, and rows are taken as they come");
            }
        }
    }
}
